"""How a worker is opened from settings, and how it answers failures and reports its loading."""
