"""``gradstow bench``: tables of what strategies do to memory, time and accuracy, measured here and now.

One file per table; importing any of them loads no torch.
"""
