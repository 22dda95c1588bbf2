"""Custom operators, registered with `torch.library` so that they stay one node in a graph and Inductor calls them as they are.

Map: `hand_over`, values in and out of a running graph; `sparse`, products with sparse projectors.
"""
