"""Files with which other programs run dovetail, and what its processes tell systemd."""
