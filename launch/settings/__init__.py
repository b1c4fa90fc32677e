"""The settings in force and their origins; the embedded models; files of thresholds."""
