"""Options of engines that the launcher carries to the processes: the launcher itself acts on none of them."""
