//! What runs cost, and that each call was charged once: facts from our own audit logs, receipts from who was paid.
