"""The steps by which ``scripts/train_demo_pair.py`` makes the bundled demonstration pair.

corpus -> model -> train -> labelled files -> evaluate, one module each; none of them knows about the
command line, and each works on what the one before it returned.
"""
