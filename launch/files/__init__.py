"""The files that commands read and write, and the folders where this user's files are."""
