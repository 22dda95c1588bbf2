"""Custom operators, registered with `torch.library` so that they stay one node in a graph and Inductor calls them as they are.

Map: `host_callback`, values in and out of a running graph; `sparse`, products with sparse projectors.
"""
