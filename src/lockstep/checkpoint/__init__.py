"""State that outlives a run: whole or not at all, free of the layout that saved it."""
