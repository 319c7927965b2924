"""What was found, as files: records of results, and what ran where."""
