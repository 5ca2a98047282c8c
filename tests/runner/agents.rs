//! A1, A2: Tests of the catalog: its files, the errors of wrong files, and whether an agent can run on this machine.

mod connections;
mod envelope;
mod mcp_commands;
mod modes;
mod openclaw;
mod output_renderer;
mod run_command;
mod tool_jobs;
mod tools;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use cogni_gateway::gateway::pipeline::policy::PolicyConfig;
use cogni_gateway::llm::budget::BudgetLimits;
use cogni_gateway::llm::request::ProviderCapability;
use cogni_gateway::runner::agents::availability::{
    AvailabilityCache, HostCapabilities, check_available,
};
use cogni_gateway::runner::agents::placeholders::PlaceholderValues;
use cogni_gateway::runner::agents::{AgentCatalog, AgentDefinition, AgentSummary, DriverChoice};
use cogni_gateway::sandbox::InitBinary;
use cogni_gateway::tools::agent_modes::ToolGroup;
use proptest::prelude::*;
use tempfile::TempDir;
use tokio::time::sleep;

const PLAIN: &str = "name = 'a'\ndescription = 'd'\nversion = 1\nargv = ['true']\n";

/// A directory with one agent.
struct AgentDirectory {
    folder: TempDir,
}

impl AgentDirectory {
    fn new(text: &str) -> Self {
        let agents = Self { folder: tempfile::tempdir().unwrap() };
        agents.write("a.toml", text);
        agents
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn load(&self) -> Result<AgentCatalog, String> {
        AgentCatalog::load_directory(self.folder.path()).map_err(|error| {
            let error = format!("{:#}", anyhow::Error::from(error));
            error.replace(self.folder.path().to_str().unwrap(), "agents")
        })
    }

    fn entry(&self) -> AgentDefinition {
        AgentDefinition::clone(self.load().unwrap().find_agent("a").unwrap())
    }
}

fn agent_definition(more: &str) -> AgentDefinition {
    AgentDirectory::new(&format!("{PLAIN}{more}")).entry()
}

/// A1: The error of a mistake names file, line and key, and says what would be correct.
#[test]
fn the_error_of_a_mistake_names_its_place() {
    let mut messages = vec![];
    for text in [
        "name = 'a'\n",
        "name = 'a\n",
        "name = 'b'\ndescription = 'd'\nversion = 1\nargv = ['true']\n",
        "name = 'A'\ndescription = 'd'\nversion = 1\nargv = ['true']\n",
        "name = 'a'\ndescription = 'd'\nversion = 1.5\nargv = ['true']\n",
        "name = 'a'\ndescription = 'd'\nversion = 1\nargv = []\n",
        "name = 'a'\ndescription = 'd'\nversion = 1\nargv = ['run', '${PROMPT}']\n",
        &format!("{PLAIN}network = 'host'\n"),
        &format!("{PLAIN}conversation = '.cogni/messages.json'\n"),
        &format!("{PLAIN}setup = 'claude'\n"),
        &format!("{PLAIN}image = 'i'\nrootfs = '/r'\n"),
        &format!("{PLAIN}image = 'i'\ndriver = 'embedded'\n"),
        &format!("{PLAIN}driver = 'docker'\n"),
        &format!("{PLAIN}tools = ['Core Time']\n"),
        &format!("{PLAIN}capabilities = ['everything']\n"),
        &format!("{PLAIN}\n[limits]\nmax_memory = 'much'\n"),
        &format!("{PLAIN}\n[limits]\npids = 'many'\n"),
        &format!("{PLAIN}\n[budget]\nmax_turns = -1\n"),
        &format!("{PLAIN}\n[budget]\ndeadline = '0s'\n"),
        &format!("{PLAIN}\n[models]\nallow = ['m']\n\ndefault = 'n'\n"),
        &format!("{PLAIN}\n[policy.body]\nmodels = ['m']\n"),
        &format!("{PLAIN}\n[policy.body]\nunknown_fields = 'keep'\n"),
        &format!(
            "{PLAIN}\n[[policy.rules]]\nname = 'r'\nwhen = 'request.modell == \"m\"'\nrefuse = 'no'\n"
        ),
        &format!("{PLAIN}\n[openclaw]\nagent = 'main'\ndeny = ['exec']\n"),
        &format!("{PLAIN}setup = 'openclaw'\n\n[openclaw]\nagent = '../main'\n"),
        &format!("{PLAIN}setup = 'openclaw'\n\n[openclaw]\nallow = []\n"),
        &format!("{PLAIN}\n[files]\n'../x' = 'y'\n"),
        &format!("{PLAIN}\n[files]\n'x' = {{ file = 'nowhere' }}\n"),
    ] {
        messages.push(AgentDirectory::new(text).load().unwrap_err());
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    agents/a.toml:1: missing field `description`
    agents/a.toml:1: invalid literal string, expected `'`
    agents/a.toml:1: `name`: the file of `b` is named `b.toml`; rename one of them
    agents/a.toml:1: `name`: `A` is no name; give up to 64 small letters, digits, `:`, `.`, `_` and `-`, a letter or digit first
    agents/a.toml:3: `version`: give a text or a whole number
    agents/a.toml:4: `argv`: there is no program; give it, and its arguments
    agents/a.toml:4: `argv`: there is no `${PROMPT}`; there is `${RUN_ID}`, `${SESSION_ID}`, `${MODEL}`, `${AGENT}`, `${MESSAGE}`, `${PROMPT_FILE}`, `${TIMEOUT}`, and `$${` is a `${` of its own
    agents/a.toml:5: `network`: unknown field `network`, expected one of `name`, `title`, `description`, `version`, `graph_id`, `image`, `rootfs`, `driver`, `argv`, `program`, `setup`, `stream`, `mode`, `slots`, `capabilities`, `tools`, `modes`, `env`, `limits`, `models`, `budget`, `policy`, `relay`, `openclaw`, `files`
    agents/a.toml:5: `conversation`: it was removed; set `setup = "messages"`: the agent then reads `.cogni/messages.json`
    agents/a.toml:5: `setup`: unknown variant `claude`, expected `messages` or `openclaw`
    agents/a.toml:6: `rootfs`: there is an image, too; give one of them
    agents/a.toml:6: `driver`: `embedded` knows no images; say `docker`, or give `rootfs`
    agents/a.toml:5: `driver`: `docker` needs an image; give `image`
    agents/a.toml:5: `tools`: `Core Time` must be 1 to 64 small letters, digits, `_` and `-`
    agents/a.toml:5: `capabilities`: unknown variant `everything`, expected one of `web_search`, `web_fetch`, `code_interpreter`, `computer_use`, `file_search`, `image_generation`, `remote_mcp`, `remote_media`, `file_ids`, `stored_state`, `background`, `containers`, `unknown_tools`
    agents/a.toml:7: `limits.max_memory`: invalid value: string "much", expected a number of bytes, or a text such as "512m"
    agents/a.toml:7: `limits.pids`: invalid type: string "many", expected u32
    agents/a.toml:7: `budget.max_turns`: invalid value: integer `-1`, expected u64
    agents/a.toml:7: `budget.deadline`: the time is `0s`, so every call would fail; give a longer time, or leave it out to set none
    agents/a.toml:9: `models.default`: `n` is not among those that `allow` has
    agents/a.toml:7: `policy.body.models`: set an agent's models as `allow` in `[models]`
    agents/a.toml:7: `policy.body.unknown_fields`: unknown variant `keep`, expected one of `reject`, `drop`, `pass`
    agents/a.toml:6: `policy.rules`: rule `r`: `when`, line 1, column 1: `request.modell` is not a fact; `request` has `route`, `protocol`, `model`, `stream`, `bytes`, `input_tokens`, `max_output_tokens`, `choices`
    agents/a.toml:6: `openclaw`: it is for `setup = "openclaw"`; say so
    agents/a.toml:8: `openclaw.agent`: `../main` is none of its agents' ids; give letters, digits, `-` and `_`
    agents/a.toml:8: `openclaw.allow`: OpenClaw takes an empty list for all of its tools; name those it may use
    agents/a.toml:6: `files`: `../x` leads out of the workspace; give a path below it
    cannot read `agents/nowhere`: No such file or directory (os error 2)
    "#);
}

/// A1, L5: The error of a mistake in an agent's review rules does the same. The agent's rules never weaken the host's.
#[test]
fn the_error_of_a_mistake_in_review_rules_names_its_place() {
    let mut messages = vec![];
    for text in [
        &format!("{PLAIN}\n[relay]\npolicy = {{ review_files = 'few' }}\n"),
        &format!("{PLAIN}\n[relay.policy]\nnew_progam = 'hold'\n"),
        &format!("{PLAIN}\n[relay.policy]\nsecret = 'push'\n"),
        &format!("{PLAIN}\n[relay.policy]\nsecret = 'deny'\n"),
        &format!("{PLAIN}\n[relay.quarantine]\ncommits = 5\n"),
        &format!(
            "{PLAIN}\n[[relay.policy.paths]]\nwhy = 'w'\nverdict = 'hold'\nmatch = ['a']\n\n[[relay.policy.paths]]\nwhy = 'w'\nverdict = 'no'\nmatch = ['a']\n"
        ),
        &format!("{PLAIN}\n[[relay.policy.paths]]\nwhy = 'w'\nverdict = 'hold'\n"),
        &format!("{PLAIN}\n[[relay.policy.secrets]]\nname = 'ours'\npattern = '('\n"),
    ] {
        messages.push(AgentDirectory::new(text).load().unwrap_err());
    }
    insta::assert_snapshot!(messages.join("\n"), @r#"
    agents/a.toml:7: `relay.policy.review_files`: invalid type: string "few", expected usize
    agents/a.toml:7: `relay.policy.new_progam`: unknown field `new_progam`, expected one of `review_files`, `hold_files`, `review_file_bytes`, `hold_file_bytes`, `submodule`, `link_outside`, `new_program`, `strange_path`, `lfs_pointer`, `claims_provenance`, `strange_date`, `foreign_encoding`, `work_elsewhere`, `secret`, `paths`, `secrets`
    agents/a.toml:7: `relay.policy.secret`: an agent's rules are stricter than this host's, and never looser; leave it out, or give `review` or `hold`. What is looser is said in this host's own file, for all agents (`--relay-config`)
    agents/a.toml:7: `relay.policy.secret`: unknown variant `deny`, expected one of `push`, `review`, `hold`
    agents/a.toml:6: `relay.quarantine`: only the host's file (`--relay-config`) sets these limits; an agent's file may have `[relay.policy]`
    agents/a.toml:13: `relay.policy.paths.verdict`: unknown variant `no`, expected one of `push`, `review`, `hold`
    agents/a.toml:6: `relay.policy.paths`: missing field `match`
    agents/a.toml:6: `relay.policy.secrets`: a pattern is no regular expression: unclosed group
    "#);
}

/// A1: A directory without an agent is an error.
#[test]
fn a_directory_without_an_agent_is_an_error() {
    let mut messages = vec![];
    messages.push(AgentCatalog::load_directory(Path::new("/nowhere")).unwrap_err().to_string());
    let empty = AgentDirectory::new("");
    fs::rename(empty.folder.path().join("a.toml"), empty.folder.path().join("a.txt")).unwrap();
    messages.push(empty.load().unwrap_err());
    insta::assert_snapshot!(messages.join("\n"), @r"
    cannot read `/nowhere`
    there is no agent in `agents`; an agent is a file that ends in `.toml`
    ");
}

/// A1: The manual's example is a valid agent, and has every key.
#[test]
fn the_manuals_example_is_an_agent() {
    let manual = fs::read_to_string("src/manual/agents.md").unwrap();
    let blocks: Vec<_> = manual.split("```toml\n").skip(1).collect();
    let block = |at: usize| blocks[at].split("```").next().unwrap();
    let agents = AgentDirectory::new(PLAIN);
    agents.write("team-reviewer.toml", block(0));
    let catalog = agents.load().unwrap();
    assert_eq!(catalog.find_agent("team:reviewer").unwrap().models.allow.len(), 2);
    agents.write("a.toml", &format!("no_such_key = 1\n{PLAIN}"));
    let keys = agents.load().unwrap_err();
    let (_, keys) = keys.split_once("expected one of ").unwrap();
    for key in keys.split('`').skip(1).step_by(2) {
        let is_there = ["key =", "[key]", "[key.", "`key ="].map(|form| form.replace("key", key));
        assert!(is_there.iter().any(|form| block(0).contains(form)), "the example lacks `{key}`");
    }
    // The example of modes fits an agent, and the gateway's table is checked by its own tests.
    agents.write("a.toml", &format!("{PLAIN}{}", block(1)));
    assert!(agents.entry().modes.restricts(ToolGroup::Web));
    agents.write("a.toml", &format!("{PLAIN}setup = 'openclaw'\n{}", block(3)));
    let plain = AgentDirectory::new(&format!("{PLAIN}setup = 'openclaw'\n"));
    assert_eq!(agents.entry(), plain.entry());
}

/// A1: The catalog is the directory as it was read; a file that is broken later changes nothing.
#[test]
fn a_directory_is_the_whole_catalog() {
    let agents = AgentDirectory::new(PLAIN);
    agents.write("team-b.toml", &PLAIN.replace("'a'", "'team:b'"));
    agents.write("notes.md", "no agent");
    let catalog = agents.load().unwrap();
    let names: Vec<_> = catalog.entries().map(|entry| entry.name.as_str()).collect();
    assert_eq!(names, ["a", "team:b"]);
    let unknown = catalog.find_agent("sandbox:agent").unwrap_err().to_string();
    assert_eq!(unknown, "there is no agent `sandbox:agent`; there is `a`, `team:b`");
    agents.write("team-b.toml", "name = ");
    assert!(agents.load().is_err());
    assert!(catalog.find_agent("team:b").is_ok());
}

/// A1: An agent's file has a maximum size.
#[test]
fn a_file_has_a_maximum_size() {
    let agents = AgentDirectory::new(&format!("{PLAIN}# {}\n", "x".repeat(1 << 20)));
    insta::assert_snapshot!(agents.load().unwrap_err(), @"cannot read `agents/a.toml`: it has more than 1048576 bytes");
}

/// A1: The digest depends on the values of an entry, not on their spelling.
#[test]
fn a_digest_tells_agents_apart() {
    let agents = AgentDirectory::new(&format!("{PLAIN}[files]\nx = {{ file = 'x.txt' }}\n"));
    agents.write("x.txt", "one");
    let first = agents.entry().digest();
    assert_eq!(first.len(), 64);
    agents.write(
        "a.toml",
        &format!("# A comment.\n{PLAIN}slots = 0\n[files]\nx = {{ file = 'x.txt' }}\n"),
    );
    // A value that equals the default changes nothing.
    assert_eq!(agents.entry().digest(), first);
    agents.write("x.txt", "two");
    assert_ne!(agents.entry().digest(), first);
    let one = agent_definition("").digest();
    for more in [
        "slots = 1",
        "image = 'i'",
        "[env]\nA = '1'",
        "[limits]\npids = 7",
        "[budget]\nmax_turns = 1",
    ] {
        assert_ne!(agent_definition(more).digest(), one, "{more}");
    }
}

/// A1, G6: An agent's policy is merged with its gateway's, and removes no rule of the gateway's.
#[test]
fn a_policy_is_merged_with_the_gateways() {
    let agent = agent_definition(
        "capabilities = ['web_search']\n[models]\nallow = ['m-1', 'm-2']\n[policy]\nbody_timeout = '5s'\ncutoff = 'error'\n\
         [policy.headers]\ntags = ['t']\n[policy.body]\nmax_choices = 1\n\
         [[policy.rules]]\nname = 'second'\nwhen = 'true'\nset_model = 'm-2'\n",
    );
    let base: PolicyConfig = toml::from_str(
        "max_body_bytes = 7\n[[rules]]\nname = 'first'\nwhen = 'false'\nrefuse = 'no'\n[body]\nmodels = ['m-2', 'm-3']\nmax_choices = 4\ncapabilities = ['background']\n",
    )
    .unwrap();
    let mut laid = base.clone();
    agent.apply_to(&mut laid).unwrap();
    assert_eq!(laid.body.models, ["m-2"]);
    assert_eq!(laid.body.capabilities, BTreeSet::from([ProviderCapability::WebSearch]));
    assert_eq!((laid.body.max_choices, laid.max_body_bytes), (1, 7));
    assert_eq!(
        (laid.body_timeout, &laid.headers.tags[..]),
        (Duration::from_secs(5), &["t".to_owned()][..])
    );
    let rules: Vec<_> = laid.rules.iter().map(|rule| rule.name.as_str()).collect();
    assert_eq!(rules, ["first", "second"]);

    let mut same = base.clone();
    agent_definition("").apply_to(&mut same).unwrap();
    assert_eq!(same, base);
    let none = agent_definition("[models]\nallow = ['m-9']\n").apply_to(&mut same).unwrap_err();
    insta::assert_snapshot!(none, @"none of the models that `a` may use is let through by the gateway's `policy.body.models`; add one of them there");
    assert_eq!(same.body.models, ["m-2", "m-3"]);
}

/// A1: An entry can have every policy key of a gateway's configuration.
#[test]
fn a_policy_has_the_keys_of_the_gateways() {
    let keys = |error: String| {
        let (_, expected) = error.split_once("expected ").unwrap();
        expected.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let agents = AgentDirectory::new(PLAIN);
    for (table, own) in [("", &[][..]), ("headers", &[]), ("body", &["models", "capabilities"])] {
        let dot = if table.is_empty() { "" } else { "." };
        agents.write("a.toml", &format!("{PLAIN}[policy{dot}{table}]\nno_such_key = 1\n"));
        let here = keys(agents.load().unwrap_err());
        let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        let mut there = keys(
            toml::from_str::<PolicyConfig>(&format!("{header}no_such_key = 1\n"))
                .unwrap_err()
                .to_string(),
        );
        there.retain(|key| !own.contains(&key.as_str()));
        assert_eq!(here, there, "{table}");
    }
}

/// A1: An argument stays one argument, whatever replaces its placeholder.
#[test]
fn placeholders_are_filled_in_one_argument_at_a_time() {
    let values = PlaceholderValues {
        run_id: "run-1".into(),
        message: "$(id) ${RUN_ID} 'x' \"y\"\n; z".into(),
        timeout: Duration::from_millis(61_900),
        ..PlaceholderValues::default()
    };
    let words = ["${MESSAGE}", "a${RUN_ID}b${TIMEOUT}", "$${RUN_ID}", "$RUN_ID $ $$", "ü$", ""];
    let filled = values.expand(&words.map(str::to_owned)).unwrap();
    assert_eq!(
        filled,
        ["$(id) ${RUN_ID} 'x' \"y\"\n; z", "arun-1b61", "${RUN_ID}", "$RUN_ID $ $$", "ü$", ""]
    );
    let message = "x".repeat(128 * 1024);
    let most =
        PlaceholderValues { message: message[1..].to_owned(), ..PlaceholderValues::default() };
    assert!(most.expand(&["${MESSAGE}".to_owned()]).is_ok());
    let long = PlaceholderValues { message, ..PlaceholderValues::default() };
    insta::assert_snapshot!(long.expand(&["${MESSAGE}".to_owned()]).unwrap_err(), @"the message has 131072 bytes, and the agent takes it as an argument, which may have 131071; give less");
}

proptest! {
    /// A1: Text that is not a placeholder stays unchanged.
    #[test]
    fn an_argument_without_placeholders_is_unchanged(word in "([^$]|\\$[^{$]){0,40}") {
        let filled = PlaceholderValues::default().expand(std::slice::from_ref(&word)).unwrap();
        prop_assert_eq!(filled, [word]);
    }

    /// A1: The limits of an entry hold, whatever a request asks for.
    #[test]
    fn a_budget_within_another_is_no_larger(asked in any_limits(), most in any_limits()) {
        let least = asked.clone().capped_by(&most);
        prop_assert_eq!(&least, &most.clone().capped_by(&asked));
        for (least, (asked, most)) in [
            (least.max_turns, (asked.max_turns, most.max_turns)),
            (least.deadline.map(|deadline| deadline.as_secs()), (
                asked.deadline.map(|deadline| deadline.as_secs()),
                most.deadline.map(|deadline| deadline.as_secs()),
            )),
        ] {
            prop_assert_eq!(least, asked.into_iter().chain(most).min());
        }
    }
}

fn any_limits() -> impl Strategy<Value = BudgetLimits> {
    let number = || proptest::option::of(0..9_u64);
    (number(), number()).prop_map(|(max_turns, deadline)| BudgetLimits {
        max_turns,
        deadline: deadline.map(Duration::from_secs),
        ..BudgetLimits::default()
    })
}

/// A1: An agent gets less time than its sandbox, so that it can end by itself.
#[test]
fn an_agent_has_less_time_than_its_sandbox() {
    let own = |seconds| AgentDefinition::agent_timeout(Duration::from_secs(seconds)).as_secs();
    assert_eq!([1, 60, 119, 120, 180, 600, 3600].map(own), [1, 30, 59, 60, 120, 540, 3540]);
}

fn host_capabilities(init: Option<&Path>, docker_socket: PathBuf) -> HostCapabilities {
    let init = init.map(|init| InitBinary::Configured(init.to_owned())).unwrap_or_default();
    HostCapabilities { docker_socket, driver: DriverChoice::Auto, init, may_be_unlimited: false }
}

/// A2: The reason why an agent cannot run here says what an operator can do.
#[tokio::test]
async fn an_agent_that_cannot_run_here_has_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let silent = dir.path().join("silent.sock");
    let _listener = UnixListener::bind(&silent).unwrap();
    let init = Path::new(concat!(env!("OUT_DIR"), "/cogni-init"));
    let nowhere_to_write = InitBinary::BuiltIn { directory: PathBuf::from("/proc/cogni") };
    let nowhere = || PathBuf::from("/nowhere/docker.sock");
    let mut messages = vec![];
    for (more, machine) in [
        ("", host_capabilities(Some(init), nowhere())),
        ("", host_capabilities(None, nowhere())),
        ("program = '/p'", host_capabilities(None, nowhere())),
        ("", host_capabilities(Some(Path::new("/nowhere/init")), nowhere())),
        (
            "rootfs = '/'",
            HostCapabilities { init: nowhere_to_write, ..host_capabilities(None, nowhere()) },
        ),
        ("rootfs = '/nowhere/root'", host_capabilities(Some(init), nowhere())),
        ("image = 'i:1'", host_capabilities(Some(init), nowhere())),
        ("image = 'i:1'", host_capabilities(Some(init), silent)),
    ] {
        let found = check_available(&agent_definition(more), &machine).await;
        messages.push(found.map_or_else(|reason| reason.to_string(), |()| "it can".to_owned()));
    }
    let messages = messages.join("\n").replace(dir.path().to_str().unwrap(), "folder");
    let messages = messages.replace(env!("COGNI_INIT_DIGEST"), "DIGEST");
    insta::assert_snapshot!(messages, @r"
    it can
    it can
    its program is part of cogni-init, which `--init none` disables
    there is no cogni-init at `/nowhere/init`
    cannot write `/proc/cogni/cogni-init-DIGEST`: No such file or directory (os error 2); choose a writable state directory, or give your own cogni-init with `--init`
    its root `/nowhere/root` is no directory of this machine
    it needs the image `i:1`, and there is no Docker Engine at `/nowhere/docker.sock`
    it needs the image `i:1`, and Docker Engine does not answer: no answer within 3s
    ");
}

/// A2: The result of a check is used for some seconds, and then the check is repeated.
#[tokio::test]
async fn a_check_is_reused_for_some_seconds() {
    let max_age = Duration::from_millis(500);
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("root");
    let agent = agent_definition(&format!("rootfs = '{}'", root.display()));
    let known = AvailabilityCache::new(host_capabilities(None, PathBuf::from("/nowhere")), max_age);
    assert!(known.check_cached(&agent).await.is_err());
    fs::create_dir(&root).unwrap();
    assert!(known.check_cached(&agent).await.is_err());
    sleep(2 * max_age).await;
    assert!(known.check_cached(&agent).await.is_ok());
}

/// A2: An agent is listed in the API as an object.
#[test]
fn an_agent_is_listed_as_an_object() {
    let agent = agent_definition("title = 'An agent'\ngraph_id = 'g:1'\n[models]\nallow = ['m']\n");
    let mut listed = serde_json::to_value(AgentSummary::new(&agent, &Ok(()))).unwrap();
    assert_eq!(listed["digest"], agent.digest());
    listed["digest"] = "…".into();
    insta::assert_snapshot!(listed, @r#"{"agentId":"a","available":true,"description":"d","digest":"…","graphId":"g:1","models":["m"],"modes":{"commands":"auto","files":"on","sandbox":"all","scope":"session","web":"on","workspace":"rw"},"name":"An agent","relayRules":[],"version":"1"}"#);
}

/// A2, R8: `agents` prints a list for people.
#[test]
fn the_agents_are_listed() {
    let list = |flags: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        command.env_clear().env("COGNI_DOCKER_SOCKET", "/nowhere/docker.sock");
        command
            .env("COGNI_INIT", concat!(env!("OUT_DIR"), "/cogni-init"))
            .arg("agents")
            .args(flags);
        let output = command.output().unwrap();
        String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
    };
    insta::assert_snapshot!(list(&[]), @r"
    sandbox:agent        version 1, runs in any image, and without one
                         A small agent with one tool, which runs programs in its workspace
    1 more cannot run here; `--all` shows it, and why
    ");
    insta::assert_snapshot!(list(&["--all"]), @r"
    sandbox:agent        version 1, runs in any image, and without one
                         A small agent with one tool, which runs programs in its workspace
    sandbox:openclaw     version 1, needs the image `cogni-openclaw:dev`
                         A coding agent that runs commands, and reads and edits the files of its workspace
                         cannot run here: it needs the image `cogni-openclaw:dev`, and there is no Docker Engine at `/nowhere/docker.sock`
    ");
    let own =
        AgentDirectory::new(&format!("{PLAIN}[relay.policy]\nhold_files = 3\nsecret = 'hold'\n"));
    let own = list(&["--agents-dir", own.folder.path().to_str().unwrap()]);
    insta::assert_snapshot!(own, @r"
    a                    version 1, runs in any image, and without one
                         d
                         its own relay rules: hold_files, secret
    ");
    let json: serde_json::Value = serde_json::from_str(&list(&["--json", "--all"])).unwrap();
    assert_eq!(json["agents"].as_array().unwrap().len(), 2);
    let file = list(&["--file", "sandbox:openclaw"]);
    assert_eq!(file, fs::read_to_string("config/agents/sandbox-openclaw.toml").unwrap());
    insta::assert_snapshot!(list(&["--file", "sandbox:other"]), @"error: there is no agent `sandbox:other`; there is `sandbox:agent`, `sandbox:openclaw`");
}
