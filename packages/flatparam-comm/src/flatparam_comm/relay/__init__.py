"""The relay of failures between the processes of a process group, through the group's store."""
