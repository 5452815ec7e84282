"""How the ranks of one model exchange bytes, and what happens if they disagree or die.

    Group               the ranks of one model, and their exchanges (group, control, exchanges; from a mesh: mesh)
      ProcessGroups     zc's own process groups                     (process_groups)
      Routes            the ways in which buckets travel            (routes; by_memory and encoded are handed over)
      Neighbours        ranks of one host read each other's memory  (hosts finds them; neighbours, memory, links)
      Journal           the exchanges that this rank has started    (journal)
        Watch           compares the journals of all ranks          (watch, verdicts, process)
    Announcement        ranks tell each other what they do next     (announcement)
    Work                one exchange in flight                      (work)
                        threads end before the interpreter does     (ending)
"""
