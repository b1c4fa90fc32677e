"""The files that commands read and write, and the folders of this user's files."""
