"""The recipe of the text that the embedded models were trained on: a grammar of our own, and the
simple parts of a corpus."""
