"""Files with which other programs run dovetail, and notifications to systemd."""
