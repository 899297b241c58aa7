"""The live page: ``coterie watch``.

``following`` looks at run directories again and again, ``rows`` and ``feeds`` make of it what pages
show and send to them what has changed, ``control`` stops and resumes runs, ``guarding`` says who
may see and do that, ``app`` has the addresses, ``commands`` the command.
"""
