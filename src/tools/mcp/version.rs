//! The versions of MCP that a run's socket serves.

/// An era of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum McpEra {
    /// The revisions that begin with `initialize`.
    Legacy,
    /// The revision 2026-07-28, in which every message is complete in itself.
    Modern,
}

/// The version of the modern era.
pub(super) const MODERN_VERSION: &str = "2026-07-28";

/// The newest version of the legacy era.
pub(super) const NEWEST_LEGACY_VERSION: &str = "2025-11-25";

/// The versions of both eras, the newest first.
pub(super) const SERVED_VERSIONS: [&str; 5] =
    [MODERN_VERSION, NEWEST_LEGACY_VERSION, "2025-06-18", "2025-03-26", "2024-11-05"];
