"""Tables, figures, report and claims from recorded JSON and published numbers. Imports neither torch nor Hydra.

``python -m analysis {tables,figures,report,claims} --runs PATH --out PATH``
"""
