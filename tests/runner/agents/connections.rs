//! T6: A test of a connection from inside a sandbox of the embedded driver, through the port of `cogni-init`.

use std::fs;
use std::path::Path;
use std::process::Command;

use cogni_gateway::llm::budget::Nanodollars;

use super::run_command::AgentRuns;
use crate::support::git_server::GitServer;
use crate::support::test_ca::TestCa;

/// T6: An agent's git clones a private repository by its usual address. The sandbox has no network, and nothing in it
/// has the credential.
#[tokio::test]
async fn git_in_a_sandbox_clones_without_the_credential() {
    let runs = AgentRuns::new().await;
    let root = tempfile::tempdir().unwrap();
    make_repository(root.path());
    let ca = TestCa::new();
    let server = GitServer::start_tls(root.path(), TOKEN, ca.server("localhost", &["http/1.1"]));
    fs::write(runs.path("token"), TOKEN).unwrap();
    let gateway = format!(
        "[tools.connections.code]
        url = 'https://localhost:{}'
        ca_file = '{}'
        allow_private_addresses = true
        credential = {{ file = '{}', basic = 'x-access-token' }}
        allow = ['GET /acme/*/info/refs', 'POST /acme/*/git-upload-pack']
        price_usd = '0.25'
        git = ['https://git.example.com/']
        env = {{ CODE_URL = '${{URL}}/acme' }}",
        server.address.port(),
        ca.file.display(),
        runs.path("token").display()
    );
    fs::write(runs.path("gateway.toml"), gateway).unwrap();
    let agents = runs.path("agents");
    fs::create_dir_all(&agents).unwrap();
    let script = "
        export HOME=/tmp
        git clone -q https://git.example.com/acme/site.git /tmp/site >&2; echo exit $? >&2
        cat /tmp/site/file.txt >&2
        echo $CODE_URL >&2
        git clone -q https://git.example.com/other/site.git /tmp/other >&2 || echo refused >&2
        grep -r TOKEN_OF_HOST /tmp /proc/self/environ >&2 || echo nowhere >&2
    "
    .replace("TOKEN_OF_HOST", &TOKEN[4..]);
    let agent = format!(
        "name = 'caller'\ndescription = 'clones'\nversion = 'a'\ntools = ['connect__code']\nargv = ['sh', '-c', '''{script}''']\n"
    );
    fs::write(agents.join("caller.toml"), agent).unwrap();
    let flags = "--config gateway.toml --agents-dir agents --agent caller --message x --model m-1";
    let flags: Vec<_> = flags.split(' ').collect();
    let result = runs.run(&flags).await;
    let stderr = result["stderr"].as_str().unwrap();
    for line in ["exit 0", "private text", "http://localhost:8080/connect/code/acme", "refused"] {
        assert!(stderr.lines().any(|own| own == line), "{line}: {stderr}");
    }
    assert!(stderr.ends_with("nowhere\n"), "{stderr}");
    // Each request of the clone has the price; the refused one has none.
    let sent = server.seen().len();
    assert!(sent >= 2, "{:?}", server.seen());
    let cost = Nanodollars(250_000_000 * u64::try_from(sent).unwrap());
    assert_eq!(result["usage"]["cost_usd"], cost.to_string(), "{result}");
}

/// T6: curl and git in a sandbox reach a server by its own address, with the variables that a sandbox has, and the
/// operator's own variables stay. The sandbox has no network, and nothing in it has the credential.
#[tokio::test]
async fn programs_in_a_sandbox_use_the_servers_own_address() {
    let runs = AgentRuns::new().await;
    let root = tempfile::tempdir().unwrap();
    make_repository(root.path());
    let ca = TestCa::new();
    // Every resolver leads this name to this machine.
    let host = "code.localhost";
    let server = GitServer::start_tls(root.path(), TOKEN, ca.server(host, &["http/1.1"]));
    fs::write(runs.path("token"), TOKEN).unwrap();
    let gateway = format!(
        "[tools.connections.code]
        url = 'https://{host}:{}'
        ca_file = '{}'
        allow_private_addresses = true
        credential = {{ file = '{}', basic = 'x-access-token' }}
        allow = ['GET /acme/*/info/refs', 'POST /acme/*/git-upload-pack']
        tunnel = true
        env = {{ NO_PROXY = '127.0.0.1', no_proxy = '127.0.0.1' }}",
        server.address.port(),
        ca.file.display(),
        runs.path("token").display()
    );
    fs::write(runs.path("gateway.toml"), gateway).unwrap();
    let agents = runs.path("agents");
    fs::create_dir_all(&agents).unwrap();
    let script = "
        export HOME=/tmp
        curl -sS -o /tmp/refs -w 'status %{http_code}\n' URL/acme/site.git/info/refs?service=git-upload-pack >&2
        git clone -q URL/acme/site.git /tmp/site >&2; echo exit $? >&2
        cat /tmp/site/file.txt >&2
        curl -sS -o /tmp/denied -w 'status %{http_code}\n' URL/other >&2
        curl -sS https://other.localhost/ >&2 || echo closed >&2
        echo $SSL_CERT_FILE $DENO_CERT $HTTPS_PROXY $no_proxy >&2
        grep -rE 'TOKEN_OF_HOST|PRIVATE KEY' /tmp /run /proc/self/environ >&2 || echo nowhere >&2
    "
    .replace("URL", &format!("https://{host}:{}", server.address.port()))
    .replace("TOKEN_OF_HOST", &TOKEN[4..]);
    let agent = format!(
        "name = 'caller'\ndescription = 'clones'\nversion = 'a'\ntools = ['connect__code']\nargv = ['sh', '-c', '''{script}''']\nenv = {{ DENO_CERT = '/own' }}\n"
    );
    fs::write(agents.join("caller.toml"), agent).unwrap();
    let flags = "--config gateway.toml --agents-dir agents --agent caller --message x --model m-1";
    let flags: Vec<_> = flags.split(' ').collect();
    let result = runs.run(&flags).await;
    let stderr = result["stderr"].as_str().unwrap();
    let variables = "/run/tunnel-ca.pem /own http://localhost:8080 127.0.0.1";
    for line in ["status 200", "exit 0", "private text", "status 403", "closed", variables] {
        assert!(stderr.lines().any(|own| own == line), "{line}: {stderr}");
    }
    assert!(stderr.ends_with("nowhere\n"), "{stderr}");
    assert!(server.seen().iter().all(|line| line.ends_with("200")), "{:?}", server.seen());
}

fn make_repository(root: &Path) {
    let git = |directory: &Path, arguments: &[&str]| {
        let own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"];
        let arguments = [&own, arguments].concat();
        let status = Command::new("git").args(arguments).current_dir(directory).status().unwrap();
        assert!(status.success());
    };
    git(root, &["init", "-q", "work"]);
    let work = root.join("work");
    fs::write(work.join("file.txt"), "private text\n").unwrap();
    git(&work, &["add", "."]);
    git(&work, &["commit", "-q", "-m", "one"]);
    git(root, &["clone", "-q", "--bare", "work", "acme/site.git"]);
}

const TOKEN: &str = "ghs_of-the-host-0123456789";
