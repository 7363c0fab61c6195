"""Sphinx settings: Markdown pages, and the public names from their docstrings."""

project = "reshard"
author = "The reshard authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
exclude_patterns = ["build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
suppress_warnings = ["myst.xref_missing", "myst.header", "ref.python"]
