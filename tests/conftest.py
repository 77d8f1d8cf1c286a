"""For every test: a name query that is lost costs a second, not five.

torch's stores look up the name of each peer that connects, by an address (::ffff:127.0.0.1) that /etc/hosts
does not have. A name server that drops some of many queries would hold up every launch of ranks.
"""

import os

os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
