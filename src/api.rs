//! The service over HTTP: agents, chats, runs and what they cost, for those who hold a grant.
