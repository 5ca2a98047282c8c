//! The manual, whose pages are longer than the head of a module should be. Its links and examples are checked with the
//! rest of the documentation.
//!
//! A page defines its links at its end, as files, for readers on a forge. In this documentation the definitions of
//! `rustdoc_links.md` precede the page's own definitions and so win: the same links lead to modules and items.

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/agent.md")]
pub mod agent {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/agents.md")]
pub mod agents {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/architecture.md")]
pub mod architecture {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/billing.md")]
pub mod billing {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/changelog.md")]
pub mod changelog {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/clients.md")]
pub mod clients {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/connections.md")]
pub mod connections {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/glossary.md")]
pub mod glossary {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/init.md")]
pub mod init {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/operations.md")]
pub mod operations {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/policy.md")]
pub mod policy {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/refusals.md")]
pub mod refusals {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/relay.md")]
pub mod relay {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/requirements.md")]
pub mod requirements {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/rules.md")]
pub mod rules {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/runner.md")]
pub mod runner {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/security.md")]
pub mod security {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/service.md")]
pub mod service {}

#[doc = include_str!("manual/rustdoc_links.md")]
#[doc = include_str!("manual/tools.md")]
pub mod tools {}

/// Records of design decisions and their reasons, one decision per page.
pub mod decisions {
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0001-one-package-with-rooms.md")]
    pub mod d0001 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0002-plain-functions-on-the-data-plane.md")]
    pub mod d0002 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0003-own-http1-client-upstream.md")]
    pub mod d0003 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0004-write-the-audit-inline.md")]
    pub mod d0004 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0005-retry-only-what-was-not-delivered.md")]
    pub mod d0005 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0006-unwind-not-abort.md")]
    pub mod d0006 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0007-one-runtime-per-worker.md")]
    pub mod d0007 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0008-settings-have-one-table.md")]
    pub mod d0008 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0009-a-signed-token-stands-for-the-run.md")]
    pub mod d0009 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0010-ask-rules-with-a-tree-of-our-own.md")]
    pub mod d0010 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0011-operators-have-a-socket-of-their-own.md")]
    pub mod d0011 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0012-one-thread-and-no-runtime-in-the-sandbox.md")]
    pub mod d0012 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0013-describe-a-sandbox-purely-drive-it-thinly.md")]
    pub mod d0013 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0014-run-the-container-in-a-helper.md")]
    pub mod d0014 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0015-take-bundles-into-quarantine-and-judge-the-hosts-own-diff.md")]
    pub mod d0015 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0016-run-through-the-first-process.md")]
    pub mod d0016 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0017-charge-a-call-where-both-accounts-of-it-meet.md")]
    pub mod d0017 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0018-one-journal-one-process-definite-ends.md")]
    pub mod d0018 {}

    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0019-measure-workspaces-and-lock-them-by-their-label.md")]
    pub mod d0019 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0020-an-agents-rules-are-stricter-and-stay-with-its-work.md")]
    pub mod d0020 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0021-tell-an-end-when-it-is-written.md")]
    pub mod d0021 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0023-remember-in-the-journal-how-a-log-ended.md")]
    pub mod d0023 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0024-tell-litellm-whose-books-a-call-is-for.md")]
    pub mod d0024 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0025-the-relay-makes-every-commit-anew.md")]
    pub mod d0025 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0026-name-a-workspace-before-its-agent-comes.md")]
    pub mod d0026 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0027-leave-memory-files-and-pid-handles-to-agents.md")]
    pub mod d0027 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0028-give-each-sandbox-a-user-of-its-own.md")]
    pub mod d0028 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0029-what-a-dependency-costs-to-build.md")]
    pub mod d0029 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0030-build-once-for-everything.md")]
    pub mod d0030 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0031-judge-the-addresses-that-a-name-leads-to.md")]
    pub mod d0031 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0032-embed-addresses-as-text-where-the-model-says-so.md")]
    pub mod d0032 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0033-serve-plain-calls-in-front-of-hyper.md")]
    pub mod d0033 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0034-digest-what-is-written-not-what-the-code-is-called.md")]
    pub mod d0034 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0035-put-modules-in-wings-and-name-types-in-full.md")]
    pub mod d0035 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0036-resolve-a-run-once.md")]
    pub mod d0036 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0037-ask-git-several-questions-in-one-sandbox.md")]
    pub mod d0037 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0038-use-crates-for-what-is-not-ours.md")]
    pub mod d0038 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0039-serve-tools-behind-an-endpoint-that-the-gateway-does-not-know.md")]
    pub mod d0039 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0040-serve-mcp-without-state.md")]
    pub mod d0040 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0041-ask-servers-of-mcp-with-a-client-of-our-own.md")]
    pub mod d0041 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0042-approve-one-call-by-its-digest.md")]
    pub mod d0042 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0043-let-a-spent-budget-ask-in-the-ledger.md")]
    pub mod d0043 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0044-inject-credentials-by-route.md")]
    pub mod d0044 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0045-let-a-denial-become-a-standing-approval.md")]
    pub mod d0045 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0046-end-tls-in-the-gateway-with-an-authority-for-each-run.md")]
    pub mod d0046 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0047-sign-requests-for-aws.md")]
    pub mod d0047 {}
    #[doc = include_str!("manual/decisions/0048-lay-out-the-shipped-program-by-a-profile.md")]
    pub mod d0048 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0049-tell-the-progress-of-a-call-in-its-own-answer.md")]
    pub mod d0049 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0050-give-a-servers-program-a-socket-as-its-standard-input.md")]
    pub mod d0050 {}
    #[doc = include_str!("manual/decisions/0051-let-people-set-the-policy-of-an-agent-beside-the-configuration.md")]
    pub mod d0051 {}
    #[doc = include_str!("manual/rustdoc_links.md")]
    #[doc = include_str!("manual/decisions/0052-switch-groups-of-tools-and-never-the-sandbox.md")]
    pub mod d0052 {}
}
