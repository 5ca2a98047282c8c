//! The second half of the demo: an agent in a sandbox, whose commits reach a pull request.
//!
//! The demo calls this program's `run` like a user does. The servers behind the run are on this machine's loopback
//! interface.

use std::env;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::bail;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::write_heading;
use crate::fakes::github_server::{FakeGithub, FakeGithubHandle};
use crate::fakes::model_provider::{FakeProvider, ProviderScript};
use crate::relay::git::GitProgram;

/// Runs an agent in a sandbox and narrates it, or prints why this machine cannot run it.
pub(super) async fn run_sandbox_demo(directory: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let provider = FakeProvider::bind(local, provider_script()?).await?;
    let forge = FakeGithub::bind(local).await?;
    let stop = CancellationToken::new();
    let stage = DemoEnvironment {
        directory: directory.to_owned(),
        upstream: provider.addr(),
        hub: forge.github_handle(),
        // Without git the run still works, only without a repository.
        has_git: GitProgram::find(&directory.join("git")).is_ok()
            && create_repository(directory).is_ok(),
    };
    stage.hub.add_repository(REPOSITORY_NAME, &directory.join("site.git"));
    stage.hub.accept_token(GITHUB_TOKEN);
    let narration = async {
        let result = stage.narrate_run(out).await;
        stop.cancel();
        result
    };
    let (result, (), ()) =
        tokio::join!(narration, provider.serve(stop.clone()), forge.serve(stop.clone()));
    result
}

/// The servers and directories around the sandbox.
struct DemoEnvironment {
    directory: PathBuf,
    upstream: SocketAddr,
    hub: FakeGithubHandle,
    has_git: bool,
}

impl DemoEnvironment {
    async fn narrate_run(&self, out: &mut impl Write) -> anyhow::Result<()> {
        write_heading(out, "9. An agent in a sandbox: it looks around, and commits its work")?;
        let url = format!("{}/{REPOSITORY_NAME}.git", self.hub.url());
        let mut flags = vec!["--agent", "sandbox:agent", "--message", "Say what you see."];
        // With a repository, the run delivers its commits and opens a pull request.
        if self.has_git {
            flags.extend(["--repo", &url, "--branch-key", "demo", "--pull-request"]);
        }
        // Only root can limit what a sandbox uses of the machine.
        let is_root = rustix::process::geteuid().is_root();
        if !is_root {
            flags.push("--allow-unlimited");
        }
        // The other scenes are worth showing on a machine that can make no sandbox.
        let Some(result) = self.run_command(&flags, out).await? else { return Ok(()) };
        let text = result["agent"]["payloads"][0]["text"].as_str().unwrap_or_default();
        // The fake model answers with the tool's result, which is JSON. Other text is printed as it is.
        let seen: Value = serde_json::from_str(text).unwrap_or_default();
        for line in seen["stdout"].as_str().unwrap_or(text).lines() {
            writeln!(out, "  agent saw      {line}")?;
        }
        if result["ok"] != true {
            bail!("the agent's run was not ok: {result}");
        }
        writeln!(
            out,
            "  the host saw   {} calls, {} tokens out; start to finish {} ms",
            result["usage"]["turns"], result["usage"]["output"], result["timings"]["total_ms"]
        )?;
        self.narrate_delivery(&result, out)?;

        write_heading(out, "10. The same agent with a budget of one call")?;
        let mut flags = vec!["--agent", "sandbox:agent", "--message", "Again.", "--max-turns", "1"];
        if !is_root {
            flags.push("--allow-unlimited");
        }
        let Some(result) = self.run_command(&flags, out).await? else { return Ok(()) };
        writeln!(out, "  the run is     ok: {}, {}", result["ok"], result["error_code"])?;

        write_heading(out, "11. What is left of the sandboxes")?;
        // A removed sandbox leaves no directory behind.
        let left = fs::read_dir(self.directory.join("r"))?.count();
        writeln!(
            out,
            "  {left} directories, and no process: `cogni-gateway sweep` would say so after a crash"
        )?;
        Ok(())
    }

    fn narrate_delivery(&self, result: &Value, out: &mut impl Write) -> anyhow::Result<()> {
        let relay = &result["relay"];
        if !self.has_git {
            return Ok(writeln!(
                out,
                "  its commits    go nowhere: there is no git 2.39 or newer here"
            )?);
        }
        let Some(pull) = self.hub.pulls(REPOSITORY_NAME).pop() else {
            return Ok(writeln!(out, "  its commits    are not delivered: {}", relay["why"])?);
        };
        let head = relay["head"].as_str().unwrap_or_default();
        let short = head.get(..12).unwrap_or(head);
        writeln!(
            out,
            "  its commits    {} at {short}, verdict {}",
            relay["branch"], relay["verdict"]
        )?;
        writeln!(
            out,
            "  pull request   {} ({} into {})",
            relay["pull_request_url"], pull.head, pull.base
        )?;
        Ok(())
    }

    /// Runs `cogni-gateway run` as a user would, and returns the JSON object that it prints. If the run cannot begin on this
    /// machine, the function writes the reason and returns `None`.
    async fn run_command(
        &self,
        flags: &[&str],
        out: &mut impl Write,
    ) -> anyhow::Result<Option<Value>> {
        let shown: Vec<_> = flags.iter().map(|flag| quote_shell_word(flag)).collect();
        writeln!(out, "  $ cogni-gateway run {}", shown.join(" "))?;
        let mut command = Command::new(env::current_exe()?);
        command
            // An empty environment: the caller's own settings must not change the demo.
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            // The lines of the run's log would appear between the lines of the narration.
            .env("LOG", "error")
            .env("BILLING_ACCOUNT_ID", "acct-demo")
            .env("LITELLM_HOST", self.upstream.to_string())
            .env("LITELLM_MASTER_KEY", "sk-real-key")
            .env("COGNI_MODEL", "demo")
            .env("COGNI_RUN_DIR", self.directory.join("r"))
            .env("COGNI_STATE_DIR", self.directory.join("state"))
            .env("GITHUB_API_URL", self.hub.url())
            .env("GITHUB_TOKEN", GITHUB_TOKEN)
            .arg("run")
            .args(flags)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        // The wait blocks, and the fake servers run on this thread's runtime.
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        if let Ok(result) = serde_json::from_slice(&output.stdout) {
            return Ok(Some(result));
        }
        // Without a result the run could not begin, and standard error has the reason.
        let stderr = String::from_utf8_lossy(&output.stderr);
        writeln!(out, "  not here       {}", stderr.trim().trim_start_matches("error: "))?;
        writeln!(out, "                 `cogni-gateway doctor` says what this machine lacks")?;
        Ok(None)
    }
}

/// Scripts the model: first one call of the agent's tool, then an answer with the call's result.
fn provider_script() -> anyhow::Result<ProviderScript> {
    let arguments = json!({"argv": ["sh", "-c", AGENT_SCRIPT]}).to_string();
    // The script's format separates values by these characters.
    let escaped = arguments.replace('%', "%25").replace(',', "%2c").replace(';', "%3b");
    let escaped = escaped.replace('\n', "%0a");
    Ok(ProviderScript::default()
        .with_overrides(&format!("tool=exec,echo=yes,arguments={escaped}"))?)
}

/// Creates a bare repository with one commit, as a forge would have it.
fn create_repository(directory: &Path) -> anyhow::Result<()> {
    let git = |subdirectory: &str, words: &[&str]| {
        let mut command = Command::new("git");
        command
            .current_dir(directory.join(subdirectory))
            // The caller's git configuration must not change the demo.
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin")
            .env("HOME", directory)
            .args(["-c", "user.name=demo", "-c", "user.email=demo@example.org"])
            .args(words)
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        anyhow::ensure!(command.status()?.success(), "git failed");
        Ok(())
    };
    git("", &["init", "--bare", "--initial-branch=main", "site.git"])?;
    git("", &["init", "--initial-branch=main", "work"])?;
    fs::write(directory.join("work/README"), "A site.\n")?;
    git("work", &["add", "README"])?;
    git("work", &["commit", "--message=first"])?;
    git("work", &["push", "../site.git", "main"])
}

fn quote_shell_word(word: &str) -> String {
    if word.contains(' ') { format!("'{word}'") } else { word.to_owned() }
}

/// The shell script that the agent's tool executes.
const AGENT_SCRIPT: &str = "
echo \"its user      $(id -u); interfaces: $(ls /sys/class/net)\"
echo \"its key       $OPENAI_API_KEY\"
echo \"the internet  $(bash -c 'exec 3<>/dev/tcp/1.1.1.1/80' 2>&1 | sed 's/.*: //' | head -1)\"
touch /usr/x 2>/dev/null && echo 'wrote to /usr' || echo 'cannot write outside of its workspace'
git rev-parse --git-dir >/dev/null 2>&1 || exit 0
echo '<h1>Hello</h1>' > index.html && git add index.html && git commit --quiet --message='Add a page' && git log --oneline
";

const REPOSITORY_NAME: &str = "acme/site";

/// The only token that the fake GitHub accepts.
const GITHUB_TOKEN: &str = "ghp_demo";
