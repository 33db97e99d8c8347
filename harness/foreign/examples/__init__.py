"""Implementations in the manner of public ones, in our own words: the protocol suite is shown on them."""
