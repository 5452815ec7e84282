"""How the ranks of one model exchange bytes, and what happens if they disagree or die.

    Group               the ranks of one model, and their exchanges (group, control, exchanges; meshes makes them)
      ProcessGroups     zc's own process groups                     (process)
      Routes            the ways in which buckets travel            (routes)
      Neighbours        ranks of one host read each other's memory  (neighbours, which hosts finds and connects)
      Journal           the exchanges that this rank has started    (journal)
        Watch           compares the journals of all ranks          (watch)
    Work                one exchange in flight                      (exchanges)
                        threads end before the interpreter does     (process)
"""
