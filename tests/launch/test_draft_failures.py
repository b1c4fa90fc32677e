"""A draft that fails is said wherever a person looks, and changes no token."""
