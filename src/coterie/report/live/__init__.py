"""The live page: ``coterie watch``.

``folders`` follows run directories, ``rows`` describes runs as pages show them, ``feeds`` sends
pages what has changed, ``watching`` connects these, ``control`` stops and resumes runs,
``guarding`` controls access, and ``app`` has the addresses.
"""
