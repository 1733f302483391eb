"""The steps by which ``scripts/train_mtp_target.py`` gives a trained Llama a prediction head.

trunk, torch_head, step35: the frozen model in torch, what is trained on its hidden rows, one file of both.
"""
