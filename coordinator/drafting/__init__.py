"""Who is asked for drafts: replicas behind their circuits, as one drafter, and drafts made ahead."""
