"""The settings in force and where each came from; the embedded models; files of thresholds."""
