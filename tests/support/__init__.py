"""The helpers that tests share: tiny models, slow reference versions, verified fakes."""
