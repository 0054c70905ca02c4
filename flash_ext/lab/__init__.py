"""Small kernels that differ in one access pattern: what it costs is counted from their addresses, and on a GPU timed.

``python -m flash_ext.lab`` lists the lessons; it needs the extra ``lab``.
"""
