"""Training of small models: a demonstration target, and drafts distilled from a target."""
