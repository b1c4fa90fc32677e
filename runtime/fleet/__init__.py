"""The workers that are here: which of them serve a session, how one takes another's place."""
