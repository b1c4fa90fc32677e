"""MTP layers as draft heads."""
