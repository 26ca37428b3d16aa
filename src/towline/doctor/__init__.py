"""What the surroundings of a bridge can keep of what its file promises: a table of checks, asked before the start.

A check is a code, a promise and a rule; facts are asked for when a rule needs them, and each once. Nothing that is made
here can be received by a line, and nothing of a line's is touched [I16].
"""
