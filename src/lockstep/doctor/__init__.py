"""Is this machine set up? What is here, whether it works, and the line to mend what does not."""
