"""A fleet of servers under a load, as discrete events: what passes and rounds cost on each kind of
server comes from the one cost model, what rounds bring from recorded replies.

Passes are played, those that are alike as one step: the sessions of a server get a round each, and
rows of prompts share its pass by the rules of the real coordinator. Abstracted: a round brings
every session tau tokens, and contexts count with their mean. A coordinator is one server of its own
load, whose queue lengthens rounds by their mean. Requests, their placement, the fair queue,
failures and repairs are events of their own.
"""
