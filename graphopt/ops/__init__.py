"""Custom operators, registered with `torch.library` so that they stay one node in a graph and Inductor calls them as they are.

Map: `sampling`, which rows a sampler keeps and by what they are scaled.
"""
