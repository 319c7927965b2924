"""Collectives and the ledger that counts them."""
