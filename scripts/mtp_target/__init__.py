"""The steps by which ``scripts/train_mtp_target.py`` gives a trained Llama a prediction head.

trunk -> head -> export: the frozen model in torch, what is trained on its hidden rows, and one file of both.
"""
