"""A lab for speculative decoding under grammars: real engines, named patches, one ledger per run."""

__version__ = "0.1.0"
