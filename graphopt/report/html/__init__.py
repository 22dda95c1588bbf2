"""The report as one page of HTML that needs nothing else: `details` gathers what it shows and fills the template.

The template, its style and its program are the files beside these modules. Nothing on the page is loaded from a network.
"""
