"""Cases in processes of their own, in which nothing ran before.

messages.py  what is asked and answered, as plain builtins
client.py    the pytest process's side: starts processes, follows a case, ends it when its time is up
server.py    the other side: forks a process for each case, or serves one case and ends
warm.py      what is imported before the first fork
work.py      one case or one shapes check, wherever it runs
"""
