"""draftsmith: train EAGLE-3 draft heads, with every intermediate file checked before it is used."""

__version__ = "0.1.0"
