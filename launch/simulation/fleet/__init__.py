"""A fleet of servers under a load, as discrete events: what passes and rounds cost on each kind of
server comes from the one cost model, what rounds bring from recorded replies.

Abstracted: between two events a server's rounds are not played one by one. With n sessions each of
them gets tau(n) tokens every round_s(n) seconds, whatever it is about, and contexts count with
their mean. A prompt that is read beside running sessions takes half of every pass, as chunks do,
and prompts are read one after the other. A coordinator is one server of its own load, whose queue
lengthens rounds by their mean. Requests, their placement, the fair queue, failures and repairs are
events of their own.
"""
