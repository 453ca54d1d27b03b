"""Probes: what the machine is and does. `host_*` look at one host and its peers; nothing here needs torch to import.

`host_facts` are the nouns, `host_gather` fills them from the live machine, `host_checks_*` judge them, as pure
functions, so that a saved file, a recorded answer and the live machine are judged by the same code.
"""
