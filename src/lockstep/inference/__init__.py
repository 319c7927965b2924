"""A trained model as it is used: loaded, exported, imported, and writing."""
