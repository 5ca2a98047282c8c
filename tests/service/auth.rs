//! A3: Tests of grants. A grant's token is printed once and stored as a hash, and is invalid after its revocation or
//! expiry.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};

use cogni_gateway::base::db::SqliteDatabase;
use cogni_gateway::base::host_reach::HostReach;
use cogni_gateway::llm::budget::{BudgetLimits, Nanodollars, Tokens};
use cogni_gateway::service::auth::{
    AccessGrant, GRANT_SCHEMA, GrantPattern, GrantScope, GrantStore, GrantStoreError, GrantTerms,
};
use proptest::prelude::*;
use serde_json::Value;
use tempfile::{TempDir, tempdir};

use crate::support::process::wait_until;

/// A3: The store has only hashes of tokens.
#[tokio::test]
async fn the_store_has_only_hashes_of_tokens() {
    let (setup, grants) = grant_store();
    let (_, token) = grants.mint_grant("platform", grant_terms(), None).await.unwrap();
    assert!(
        token.expose_secret().starts_with("cgr_") && token.expose_secret().len() == 47,
        "of 256 bits"
    );
    for file in fs::read_dir(setup.path()).unwrap() {
        let bytes = fs::read(file.unwrap().path()).unwrap();
        let text = String::from_utf8_lossy(&bytes);
        assert!(!text.contains(&token.expose_secret()[4..]), "the token is in the file");
    }
}

#[tokio::test]
async fn a_token_stands_for_its_grant_and_no_other_text_does() {
    let (_place, grants) = grant_store();
    let (grant, token) = grants.mint_grant("platform", grant_terms(), None).await.unwrap();
    let (other, _) = grants.mint_grant("other", grant_terms(), None).await.unwrap();
    let found = grants.check_token(token.expose_secret()).await.unwrap();
    assert_eq!((&found.id, &found.terms), (&grant.id, &grant.terms));
    assert_ne!(found.id, other.id);
    let text = token.expose_secret();
    let mut last = text.to_owned();
    last.replace_range(46.., if text.ends_with('A') { "E" } else { "A" });
    for wrong in ["", "cgr_", "Bearer", &text[4..], &text[..46], &last, &format!("{text}A")] {
        assert_eq!(refusal_code(&grants, wrong).await, "unauthorized", "{wrong}");
    }
}

/// A3: A process that has just verified a grant refuses it after its revocation.
#[tokio::test]
async fn a_revoked_grant_is_refused_at_once() {
    let (_place, grants) = grant_store();
    let (grant, token) = grants.mint_grant("platform", grant_terms(), None).await.unwrap();
    grants.check_token(token.expose_secret()).await.unwrap();
    let revoked = grants.revoke_grant(&grant.id).await.unwrap();
    assert_eq!(refusal_code(&grants, token.expose_secret()).await, "grant_revoked");
    assert_eq!(
        grants.revoke_grant(&grant.id).await.unwrap().revoked,
        revoked.revoked,
        "when it was"
    );
}

/// A3: The command line can revoke a grant in the database of a running service.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_that_another_process_revokes_is_soon_worth_nothing() {
    let (setup, grants) = grant_store();
    let (grant, token) = grants.mint_grant("platform", grant_terms(), None).await.unwrap();
    grants.check_token(token.expose_secret()).await.unwrap();
    let elsewhere = GrantStore::new(open_database(setup.path()));
    elsewhere.revoke_grant(&grant.id).await.unwrap();
    let handle = tokio::runtime::Handle::current();
    tokio::task::spawn_blocking(move || {
        wait_until(
            || handle.block_on(refusal_code(&grants, token.expose_secret())) == "grant_revoked",
            || "it is still good".to_owned(),
        );
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_grant_ends_when_its_time_is_over() {
    let (_place, grants) = grant_store();
    let now = SystemTime::now();
    let (grant, past) = grants.mint_grant("past", grant_terms(), Some(now)).await.unwrap();
    assert_eq!(refusal_code(&grants, past.expose_secret()).await, "grant_expired");
    let end = grant.expires.unwrap();
    assert!(grant.check_valid_at(end - Duration::from_millis(1)).is_ok());
    assert!(grant.check_valid_at(end).is_err(), "the moment at which it ends is not its own");
    let (_, future) = grants
        .mint_grant("future", grant_terms(), Some(now + Duration::from_hours(1)))
        .await
        .unwrap();
    grants.check_token(future.expose_secret()).await.unwrap();
}

#[tokio::test]
async fn that_a_grant_is_used_is_written_down() {
    let (_place, grants) = grant_store();
    let (grant, token) = grants.mint_grant("platform", grant_terms(), None).await.unwrap();
    assert_eq!(grants.find_grant(&grant.id).await.unwrap().used, None);
    grants.check_token(token.expose_secret()).await.unwrap();
    let used = grants.find_grant(&grant.id).await.unwrap().used.unwrap();
    assert!(used >= grant.created);
}

/// A3: A grant allows only its own scopes; each missing scope has its own code and text.
#[test]
fn a_grant_allows_only_its_scopes() {
    let named = access_grant(grant_terms());
    assert_eq!(named.resolve_account(None).unwrap(), "acct-1");
    assert_eq!(named.resolve_account(Some("team-7")).unwrap(), "team-7");
    named.check_agent("sandbox:agent").unwrap();
    named.check_repository("https://github.com/acme/site.git").unwrap();
    named.check_repository("https://github.com/acme/site").unwrap();
    let nothing = access_grant(GrantTerms::default());
    let many = access_grant(GrantTerms { accounts: vec![grant_pattern("*")], ..grant_terms() });
    let refused = [
        named.check_scope(GrantScope::Admin).unwrap_err(),
        named.check_agent("sandbox:openclaw").unwrap_err(),
        named.check_agent("sandbox:agent2").unwrap_err(),
        named.resolve_account(Some("acct-2")).unwrap_err(),
        named.check_repository("https://github.com/acme-evil/site.git").unwrap_err(),
        many.resolve_account(None).unwrap_err(),
        nothing.check_scope(GrantScope::Read).unwrap_err(),
        nothing.check_sandbox().unwrap_err(),
        nothing.check_agent("sandbox:agent").unwrap_err(),
        nothing.resolve_account(None).unwrap_err(),
        nothing.check_repository("https://github.com/acme/site.git").unwrap_err(),
    ];
    let refused: Vec<_> =
        refused.iter().map(|denied| format!("{}: {denied}", denied.code())).collect();
    insta::assert_snapshot!(refused.join("\n"), @r"
    forbidden: this grant does not have `admin` access
    forbidden_agent: this grant does not allow the agent `sandbox:openclaw`
    forbidden_agent: this grant does not allow the agent `sandbox:agent2`
    forbidden_account: this grant does not allow the account `acct-2` to pay
    forbidden_repo: this grant does not allow the repository `https://github.com/acme-evil/site.git`
    forbidden_account: this grant has no default account; name an account
    forbidden: this grant does not have `read` access
    sandbox_not_allowed: this grant does not allow agents in sandboxes
    forbidden_agent: this grant does not allow the agent `sandbox:agent`
    forbidden_account: this grant has no default account; name an account
    forbidden_repo: this grant does not allow the repository `https://github.com/acme/site.git`
    ");
}

#[test]
fn terms_that_allow_nothing_are_refused() {
    let wrong = [
        GrantTerms::default(),
        GrantTerms { allow_sandbox: false, ..grant_terms() },
        GrantTerms { agents: vec![], ..grant_terms() },
        GrantTerms { accounts: vec![], ..grant_terms() },
        GrantTerms { max_runs: Some(0), ..grant_terms() },
        GrantTerms { max_cost_usd_total: Some(Nanodollars::ZERO), ..grant_terms() },
        GrantTerms { max_cost_usd_per_day: Some(Nanodollars::ZERO), ..grant_terms() },
        GrantTerms {
            budget: BudgetLimits { deadline: Some(Duration::ZERO), ..BudgetLimits::default() },
            ..grant_terms()
        },
    ];
    let messages: Vec<_> =
        wrong.iter().map(|terms| terms.validate().unwrap_err().to_string()).collect();
    insta::assert_snapshot!(messages.join("\n"), @r"
    the grant has no access; give some of read, runs, billing, admin and approve
    the grant may begin runs, and all agents run in sandboxes; allow sandboxes, too
    the grant may begin runs of no agent; name some, such as `sandbox:agent` or `*`
    the grant may begin runs, and has no account that pays; name an account
    the grant's maximum number of runs is 0; give at least 1, or no limit
    the grant may spend nothing; give a cap of more than $0, or none
    the grant may spend nothing; give a cap of more than $0, or none
    the deadline of a run is 0s, so every call would fail; give a longer time, or no limit
    ");
}

#[test]
fn a_budget_stays_below_its_ceiling() {
    let tokens = |count| Some(Tokens(count));
    let requested = BudgetLimits {
        max_turns: Some(50),
        max_total_tokens: tokens(10),
        ..BudgetLimits::default()
    };
    let ceiling = BudgetLimits {
        max_turns: Some(5),
        max_total_tokens: tokens(100),
        deadline: Some(Duration::from_mins(1)),
        ..BudgetLimits::default()
    };
    let within = requested.clone().capped_by(&ceiling);
    assert_eq!(
        (within.max_turns, within.max_total_tokens, within.deadline),
        (Some(5), tokens(10), Some(Duration::from_mins(1)))
    );
    assert_eq!(within, ceiling.capped_by(&requested), "it does not matter who says which");
}

proptest! {
    /// Whatever the text, a pattern matches only texts with the same beginning.
    #[test]
    fn a_pattern_matches_texts_with_its_prefix(given in "[!-~]{1,20}", text in "[!-~]{0,30}") {
        let Ok(pattern) = given.parse::<GrantPattern>() else { return Ok(()) };
        let expected = match given.strip_suffix('*') {
            Some(beginning) => text.starts_with(beginning),
            None => text == given,
        };
        prop_assert_eq!(pattern.matches(&text), expected);
        prop_assert!(!given[..given.len() - 1].contains('*'));
    }

    /// Stored terms are read as they were minted.
    #[test]
    fn terms_are_read_as_they_were_written(turns in any::<Option<u64>>(), seconds in 0_u64..1 << 40, runs in any::<Option<u32>>()) {
        let budget = BudgetLimits { max_turns: turns, deadline: Some(Duration::from_secs(seconds)), ..BudgetLimits::default() };
        let terms = GrantTerms { budget, max_runs: runs, ..grant_terms() };
        let text = serde_json::to_string(&terms).unwrap();
        prop_assert_eq!(serde_json::from_str::<GrantTerms>(&text).unwrap(), terms);
    }
}

/// A3: The command line mints, lists and revokes grants, and prints a token once.
#[test]
fn grants_are_minted_and_revoked_by_the_command_line() {
    let dir = tempdir().unwrap();
    let (code, token, _) = run_cogni(dir.path(), &MINT);
    assert_eq!((code, token.trim().len()), (0, 47), "{token}");
    let (_, minted, _) = run_cogni(dir.path(), &[&MINT[..], &["--ttl", "90d", "--json"]].concat());
    let minted: Value = serde_json::from_str(&minted).unwrap();
    let id = minted["id"].as_str().unwrap();
    let (_, shown, _) = run_cogni(dir.path(), &["show", id]);
    insta::with_settings!({filters => hidden_texts()}, {
        insta::assert_snapshot!(shown, @r#"
        {
          "created": "[time]",
          "expires": "[time]",
          "id": "[id]",
          "name": "the platform",
          "revoked": null,
          "state": "good",
          "terms": {
            "access": [
              "read",
              "runs"
            ],
            "accounts": [
              "acct-1"
            ],
            "agents": [
              "sandbox:*"
            ],
            "allow_sandbox": true,
            "budget": {
              "deadline": "1h",
              "max_concurrent": null,
              "max_cost_usd": "2.5",
              "max_input_tokens": null,
              "max_output_tokens": null,
              "max_total_tokens": null,
              "max_turns": 50,
              "requests_per_minute": null,
              "tokens_per_minute": null
            },
            "max_runs": 4,
            "repositories": [
              "https://github.com/acme/*"
            ]
          },
          "used": null
        }
        "#);
        insta::assert_snapshot!(run_cogni(dir.path(), &["list"]).1, @r"
        [id]  good     the platform: read, runs; never used
        [id]  good     the platform: read, runs; never used
        ");
        insta::assert_snapshot!(run_cogni(dir.path(), &["revoke", id]).1, @"[id] (the platform) is revoked");
        insta::assert_snapshot!(run_cogni(dir.path(), &["list", "--all"]).1, @r"
        [id]  good     the platform: read, runs; never used
        [id]  revoked  the platform: read, runs; never used
        ");
    });
    let (_, all, _) = run_cogni(dir.path(), &["list", "--all", "--json"]);
    assert!(all.lines().count() == 2 && !all.contains(token.trim()), "{all}");
}

/// A3: `*` does not match a repository on this machine, however it is spelled.
#[test]
fn repositories_of_this_machine_must_be_named() {
    let of = |named: &str| {
        access_grant(GrantTerms { repositories: vec![grant_pattern(named)], ..grant_terms() })
    };
    let here = [
        "file:///srv/git/site.git",
        "http://127.0.0.1:3000/acme/site.git",
        "https://localhost/acme/site.git",
        "http://[::1]:3000/acme/site.git",
    ];
    let spelled = [
        "https://127.1/acme/site.git",
        "https://2130706433/acme/site.git",
        "https://0x7f.1/acme/site.git",
        "https://0.0.0.0/acme/site.git",
        "https://[::]/acme/site.git",
        "https://[::ffff:127.0.0.1]/acme/site.git",
        "https://localhost./acme/site.git",
        "https://x.localhost/acme/site.git",
        "https://169.254.169.254/acme/site.git",
        "https://[fe80::1]/acme/site.git",
        "https://[fd12::1]/acme/site.git",
        "https://10.1.2.3/acme/site.git",
        "https://192.168.1.1:8443/acme/site.git",
        "https://100.64.0.1/acme/site.git",
        "https://224.0.0.1/acme/site.git",
    ];
    for url in here.into_iter().chain(spelled) {
        for wide in ["*", "https://*", "https:*", "https://[*", "https://[fe80:*"] {
            assert!(of(wide).check_repository(url).is_err(), "{wide} {url}");
        }
    }
    for (named, url) in [
        ("file:///srv/git/*", here[0]),
        ("http://127.0.0.1:*", here[1]),
        ("http://127.0.0.1:3000/*", here[1]),
        ("https://localhost/acme/site", here[2]),
        ("http://[::1]:3000/acme/*", here[3]),
        ("*", "https://github.com/acme/site.git"),
        ("https://*", "https://127.0.0.1.example/acme/site.git"),
    ] {
        of(named).check_repository(url).unwrap_or_else(|denied| panic!("{named}: {denied}"));
    }
}

/// A3: A host may resolve to a private network if the grant names the whole host; otherwise only to the internet.
#[test]
fn a_host_that_a_grant_names_may_be_in_a_private_network() {
    let of = |named: &[&str]| {
        let repositories = named.iter().map(|named| grant_pattern(named)).collect();
        access_grant(GrantTerms { repositories, ..grant_terms() })
    };
    let url = "https://git.company/acme/site.git";
    for wide in ["*", "https://*", "https:*"] {
        assert_eq!(of(&[wide]).check_repository(url), Ok(HostReach::Public), "{wide}");
    }
    for named in [
        "https://git.company/*",
        "https://git.company/acme/*",
        "https://git.company/acme/site",
        url,
    ] {
        assert_eq!(of(&[named]).check_repository(url), Ok(HostReach::Named), "{named}");
        assert_eq!(of(&["*", named]).check_repository(url), Ok(HostReach::Named), "{named}");
    }
    let ported = "https://git.company:8443/acme/site.git";
    assert_eq!(of(&["https://git.company:*"]).check_repository(ported), Ok(HostReach::Named));
    assert_eq!(of(&["https://git.company/*", "*"]).check_repository(ported), Ok(HostReach::Public));
    let private = "https://10.1.2.3/acme/site.git";
    assert_eq!(of(&["https://10.1.2.3/*"]).check_repository(private), Ok(HostReach::Named));
    // This address is never a valid git host, whether it is named or not.
    of(&["https://169.254.169.254/*"]).check_repository("https://169.254.169.254/a/b").unwrap_err();
}

/// The state directory comes from the service's own configuration file.
#[test]
fn a_grant_is_minted_where_the_service_has_its_state() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("serve.toml");
    let text = format!("[serve]\nstate_dir = {:?}\n", dir.path().join("there"));
    fs::write(&file, text).unwrap();
    let minted = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .args(["grant", "mint", "--name", "x", "--access", "read", "--config"])
        .arg(&file)
        .env_clear()
        .output()
        .unwrap();
    assert!(minted.status.success(), "{}", String::from_utf8_lossy(&minted.stderr));
    assert!(dir.path().join("there/state.db").exists());
}

/// A user's service has its grants in the user's own state directory, also if the configuration names no directory.
#[test]
fn a_users_grants_are_in_the_users_own_state() {
    let dir = tempdir().unwrap();
    // Other users may not read the program where cargo has put it.
    let binary = dir.path().join("cogni-gateway");
    fs::copy(env!("CARGO_BIN_EXE_cogni-gateway"), &binary).unwrap();
    let file = dir.path().join("serve.toml");
    fs::write(&file, "[serve]\nmax_runs = 1\n").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let mint = |flags: &[&str]| {
        let mut command = Command::new(&binary);
        command.args(["grant", "mint", "--name", "x", "--access", "read"]).args(flags);
        command.env_clear().env("HOME", dir.path());
        if rustix::process::geteuid().is_root() {
            command.uid(UNPRIVILEGED_USER).gid(UNPRIVILEGED_USER);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    mint(&[]);
    mint(&["--config", file.to_str().unwrap()]);
    let state = dir.path().join(".local/state/cogni");
    let (_, listed, _) = run_cogni(&state, &["list"]);
    assert_eq!(listed.lines().count(), 2, "{listed}");
}

#[test]
fn a_grant_that_makes_no_sense_is_not_minted() {
    let dir = tempdir().unwrap();
    let wrong = [
        &["mint", "--name", "x"][..],
        &["mint", "--name", "x", "--allow-sandbox"],
        &["mint", "--name", "x", "--access", "read,everything"],
        &["mint", "--name", "x", "--access", "read", "--repo", "https://*/acme"],
        &["mint", "--name", "x", "--access", "read", "--repo", "https://github.com/acme*"],
        &["mint", "--name", "x", "--access", "read", "--ttl", "20y"],
        &["mint", "--name", "", "--access", "read"],
        &["revoke", "grant-7"],
    ];
    let messages: Vec<_> = wrong
        .iter()
        .map(|arguments| {
            let (code, _, messages) = run_cogni(dir.path(), arguments);
            let messages = messages.replace(dir.path().to_str().unwrap(), "DIR");
            format!("{code} {}", messages.lines().next().unwrap())
        })
        .collect();
    insta::assert_snapshot!(messages.join("\n"), @r"
    2 error: the grant may begin runs, and all agents run in sandboxes; allow sandboxes, too (`--allow-sandbox`)
    2 error: the grant may begin runs of no agent; name some, such as `sandbox:agent` or `*` (`--agent NAME`)
    2 error: invalid value 'everything' for '--access <KIND,…>': give read, runs, billing, admin or approve
    2 error: invalid value 'https://*/acme' for '--repo <URL>': give a name, or the beginning of names and a `*`
    2 error: a repository's pattern ends in `/*`, or in `:*` for any port: `https://github.com/acme*` would be `acme-evil`'s, too (`--repo`)
    2 error: --ttl is from 1s to 10y; leave it out for a grant that does not end by itself
    2 error: the grant's name is invalid; give 1 to 128 visible characters
    2 error: there is no grant `grant-7`; `cogni-gateway grant list` shows them
    ");
}

async fn refusal_code(grants: &GrantStore, token: &str) -> &'static str {
    match grants.check_token(token).await {
        Ok(_) => "it is good",
        Err(GrantStoreError::Denied(denied)) => denied.code(),
        Err(error) => panic!("{error}"),
    }
}

fn grant_terms() -> GrantTerms {
    GrantTerms {
        access: [GrantScope::Read, GrantScope::Runs].into(),
        allow_sandbox: true,
        agents: vec![grant_pattern("sandbox:agent")],
        accounts: vec![grant_pattern("acct-1"), grant_pattern("team-*")],
        repositories: vec![grant_pattern("https://github.com/acme/*")],
        ..GrantTerms::default()
    }
}

fn access_grant(terms: GrantTerms) -> AccessGrant {
    AccessGrant {
        id: "grant-1".to_owned(),
        name: "platform".to_owned(),
        terms,
        created: SystemTime::now(),
        expires: None,
        revoked: None,
        used: None,
    }
}

fn grant_pattern(text: &str) -> GrantPattern {
    text.parse().unwrap()
}

fn grant_store() -> (TempDir, GrantStore) {
    let dir = tempdir().unwrap();
    let grants = GrantStore::new(open_database(dir.path()));
    (dir, grants)
}

fn open_database(dir: &Path) -> SqliteDatabase {
    SqliteDatabase::open_database(&dir.join("state.db"), &[GRANT_SCHEMA]).unwrap()
}

fn hidden_texts() -> Vec<(&'static str, &'static str)> {
    vec![(r"grant-[0-9a-f-]{36}", "[id]"), (r"20\d\d-\d\d-\d\dT[\d:]{8}Z", "[time]")]
}

/// Returns exit code, standard output and standard error.
fn run_cogni(dir: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"))
        .arg("grant")
        .args(arguments)
        .env_clear()
        .env("COGNI_STATE_DIR", dir)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

/// The id of a user who is not root.
const UNPRIVILEGED_USER: u32 = 65534;

const MINT: [&str; 17] = [
    "mint",
    "--name",
    "the platform",
    "--allow-sandbox",
    "--agent",
    "sandbox:*",
    "--account",
    "acct-1",
    "--repo",
    "https://github.com/acme/*",
    "--max-turns",
    "50",
    "--max-cost-usd",
    "2.50",
    "--max-runs",
    "4",
    "--deadline=1h",
];
