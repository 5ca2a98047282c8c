//! L6: Tests of git and the API client behind a company's CA and proxy.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::thread;
use std::time::Duration;

use cogni_gateway::base::host_reach::HostReach;
use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::git::{HttpProxy, OutboundConfig};
use cogni_gateway::relay::github::client::{GithubClient, GithubConfig, GithubError, RetryPolicy};
use cogni_gateway::relay::repo::{
    BranchKey, CommitNote, GitProgram, ObjectId, RepoError, RepoMirror, RepositoryUrl,
    SandboxBranch,
};

use super::setup::RelaySetup;
use crate::support::connect_proxy::ConnectProxy;
use crate::support::git_server::GitServer;
use crate::support::process::NO_LISTENER;
use crate::support::repository;
use crate::support::test_ca::TestCa;

const REF_LIST_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: application/x-git-upload-pack-advertisement\r\n\
    Connection: close\r\n\r\n001e# service=git-upload-pack\n0000";

/// The bytes after which the server gives up: more than a list of refs may take, and less than a fetch.
const MAX_SENT_BYTES: usize = 1 << 30;

const TOKEN: &str = "ghs_abcdefghijklmnopqrstuvwxyz0123456789";

/// L6: Git trusts the configured CA, and then no other.
#[test]
fn git_trusts_the_configured_ca() {
    let company = CompanyServer::new("localhost");
    let url = format!("https://localhost:{}/o/site.git", company.server.address.port());
    company
        .relays(&url, OutboundConfig { ca_file: Some(company.ca()), ..OutboundConfig::default() });
    assert!(
        company.server.seen().iter().any(|line| line == "POST /o/site.git/git-receive-pack 200")
    );

    let another = TestCa::new();
    for ca_file in [None, Some(another.file.clone())] {
        let error =
            company.ask(&url, OutboundConfig { ca_file, ..OutboundConfig::default() }).unwrap_err();
        assert!(matches!(error, RepoError::Unreachable { .. }), "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
}

/// L6: If a host can be reached only through a proxy, fetch and push use the proxy, and its password is never printed.
#[test]
fn git_uses_the_configured_proxy() {
    let company = CompanyServer::new("git.example");
    let tunnel = ConnectProxy::with_password(company.server.address);
    let by = |address: SocketAddr, except: &str| OutboundConfig {
        ca_file: Some(company.ca()),
        proxy: Some(
            HttpProxy::parse_proxy(&format!("http://me:{PASSWORD}@{address}"), except).unwrap(),
        ),
    };
    let url = "https://git.example/o/site.git";
    company.relays(url, by(tunnel.address, "other.example"));
    let requests = tunnel.asked();
    let let_in = requests.iter().filter(|one| *one == "CONNECT git.example:443 with a password");
    assert!(let_in.count() >= 3, "{requests:?}");

    // Without the proxy, the host's name does not resolve.
    let error = company.ask(url, by(tunnel.address, "git.example")).unwrap_err();
    assert!(matches!(error, RepoError::Unreachable { .. }), "{error}");
    assert_eq!(tunnel.asked(), requests);
    let error = company.ask(url, by(NO_LISTENER, "")).unwrap_err();
    assert!(matches!(error, RepoError::Unreachable { .. }), "{error}");
    assert!(!format!("{error} {error:?}").contains(PASSWORD), "{error}");
}

/// L2: A server that lists refs without end is left at a bound far below the memory of a fetch, by whatever lists its
/// refs.
#[test]
fn a_list_of_refs_without_end_is_left_early() {
    let begin = |mirror: &RepoMirror| {
        let lease = mirror.lease_branch(&BranchKey::parse("many").unwrap()).unwrap();
        mirror.ensure_branch(&lease, None, None).map(drop)
    };
    let note = |mirror: &RepoMirror| {
        let branch = SandboxBranch::from_key(BranchKey::parse("many").unwrap());
        let (head, committer) = (ObjectId::NONE, "Relay <relay@example.com>");
        mirror.put_note(CommitNote { branch: &branch, head, text: "proved", committer }, None)
    };
    for ask in [begin, note] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/o/site.git", listener.local_addr().unwrap());
        let server = thread::spawn(move || list_refs_without_end(&listener));
        let directory = tempfile::tempdir().unwrap();
        let git = GitProgram::find(&directory.path().join("git")).unwrap();
        let repository = RepositoryUrl::parse(&url).unwrap();
        let mirror = RepoMirror::open(&git, directory.path(), &repository).unwrap();
        let error = ask(&mirror).unwrap_err();
        assert!(error.to_string().contains("raise `[fetch]`"), "{error}");
        assert!(server.join().unwrap() < MAX_SENT_BYTES, "{error}");
    }
}

/// Answers one request with refs, until the client leaves. Returns the number of sent bytes.
fn list_refs_without_end(listener: &TcpListener) -> usize {
    let mut stream = listener.accept().unwrap().0;
    // The request is one packet on this machine, and its content does not matter.
    let _ = stream.read(&mut [0; 4096]).unwrap();
    stream.write_all(REF_LIST_HEAD).unwrap();
    let mut lines = vec![];
    for number in 1..=20_000 {
        writeln!(lines, "0046{number:040x} refs/heads/many/{number:08}").unwrap();
    }
    let mut sent = 0;
    while sent < MAX_SENT_BYTES && stream.write_all(&lines).is_ok() {
        sent += lines.len();
    }
    sent
}

/// L6: API calls use the same proxy and CA.
#[tokio::test]
async fn the_api_client_uses_the_same_proxy_and_ca() {
    let company = CompanyServer::new("git.example");
    let tunnel = ConnectProxy::to(company.server.address);
    let proxy = |except| HttpProxy::parse_proxy(&tunnel.address.to_string(), except).unwrap();
    let ask = async |except, ca_file| {
        let network = OutboundConfig { ca_file: Some(ca_file), proxy: Some(proxy(except)) };
        let url = "https://git.example/api/v3".parse().unwrap();
        let patience = RetryPolicy { attempts: 1, ..RetryPolicy::default() };
        let connect_timeout = Duration::from_secs(30);
        let config = GithubConfig {
            url,
            network,
            retry: patience,
            connect_timeout,
            ..GithubConfig::default()
        };
        let repository: RepositoryUrl = "https://git.example/o/site".parse().unwrap();
        let api = GithubClient::new(config).unwrap();
        api.repository_info(&SecretString::new("ghs_good"), repository.as_hosted().unwrap())
            .await
            .unwrap_err()
    };
    // The server speaks only git and requires another token, so its answer shows that the call arrived.
    let heard = Box::pin(ask("", company.ca())).await;
    assert!(matches!(heard, GithubError::Unauthorized(_)), "{heard}");
    assert_eq!(tunnel.asked(), ["CONNECT git.example:443"]);
    let (straight, doubted) = (
        Box::pin(ask(".example", company.ca())).await,
        Box::pin(ask("", TestCa::new().file.clone())).await,
    );
    assert!(matches!(straight, GithubError::NoResponse(_)), "{straight}");
    assert!(matches!(doubted, GithubError::NoResponse(_)), "{doubted}");
    assert!(doubted.to_string().contains("`GITHUB_CA_FILE`"), "{doubted}");
    assert_eq!(tunnel.asked().len(), 2, "the first of them has not gone by the proxy");
}

/// L6: The errors of git and of the API name the setting to change if a certificate or a token is wrong.
#[tokio::test(flavor = "multi_thread")]
async fn errors_name_the_setting_to_change() {
    let ours = CompanyServer::new("localhost");
    let (authority, tls) = TestCa::self_signed_server("localhost");
    let theirs = CompanyServer::behind(authority, tls);
    let (another, good, bad) = (TestCa::new(), TOKEN, "ghs_wrong");
    let mut told = vec![];
    for (case, company, ca_file, token) in [
        ("no authority", &ours, None, good),
        ("another authority", &ours, Some(another.file.clone()), good),
        ("self-signed, unknown", &theirs, None, good),
        ("self-signed, named", &theirs, Some(theirs.ca()), good),
        ("wrong token", &ours, Some(ours.ca()), bad),
    ] {
        let network = OutboundConfig { ca_file, ..OutboundConfig::default() };
        let url = format!("https://localhost:{}/o/site.git", company.server.address.port());
        let api = Box::pin(company.ask_api(&url, network.clone(), token)).await;
        let git = tokio::task::block_in_place(|| company.ask_with(&url, network, token));
        let git = git.map_or_else(|error| error.to_string(), |()| "served".to_owned());
        told.push(format!("{case}\n  API: {api}\n  git: {}", stable_error(&git)));
    }
    insta::assert_snapshot!(told.join("\n"), @r#"
    no authority
      API: GitHub did not answer: its certificate is not accepted (UnknownIssuer); name the PEM file of the authority that signed it in `GITHUB_CA_FILE`
      git: cannot reach the remote now: … name the PEM file of the authority that signed the server's certificate in `GITHUB_CA_FILE`
    another authority
      API: GitHub did not answer: its certificate is not accepted (BadSignature); name the PEM file of the authority that signed it in `GITHUB_CA_FILE`
      git: cannot reach the remote now: … name the PEM file of the authority that signed the server's certificate in `GITHUB_CA_FILE`
    self-signed, unknown
      API: GitHub did not answer: its certificate is not accepted (Other(OtherError(CaUsedAsEndEntity))); the server shows an authority's certificate as its own, such as a self-signed one: make the server one that the authority signs, and keep the authority's PEM file in `GITHUB_CA_FILE`
      git: cannot reach the remote now: … name the PEM file of the authority that signed the server's certificate in `GITHUB_CA_FILE`
    self-signed, named
      API: GitHub did not answer: its certificate is not accepted (Other(OtherError(CaUsedAsEndEntity))); the server shows an authority's certificate as its own, such as a self-signed one: make the server one that the authority signs, and keep the authority's PEM file in `GITHUB_CA_FILE`
      git: served
    wrong token
      API: GitHub does not accept the token: ; give a valid one in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`
      git: the remote denies the relay access: … check the repository's address, and give a token that may read and push to it in `GITHUB_TOKEN`, or check `GITHUB_APP_ID` and `GITHUB_APP_KEY_FILE`
    "#);
}

/// Removes the port, the file's name and the library's words, which differ from machine to machine.
fn stable_error(error: &str) -> String {
    let advice = error.rsplit_once("; ").map_or("", |(_, advice)| advice);
    let kind = error.split(": ").next().unwrap_or_default();
    if error == "served" { error.to_owned() } else { format!("{kind}: … {advice}") }
}

/// A3: A host that only a tenant has named is refused if its name resolves to this machine. A host that the operator
/// has named is allowed.
#[test]
fn a_host_of_a_tenant_must_be_on_the_internet() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let company = CompanyServer::new("localhost");
    for host in ["localhost", "x.localhost", "127.0.0.1"] {
        let url = format!("https://{host}:{port}/o/site.git");
        let error =
            company.ask_within(&url, OutboundConfig::default(), HostReach::Public).unwrap_err();
        assert!(matches!(error, RepoError::Unreachable { .. }), "{host}: {error}");
        assert!(error.to_string().contains("no address on the internet"), "{host}: {error}");
        let accepted = listener.accept().unwrap_err();
        assert_eq!(accepted.kind(), ErrorKind::WouldBlock, "{host} was connected to");
    }
    let url = format!("https://localhost:{}/o/site.git", company.server.address.port());
    let network = OutboundConfig { ca_file: Some(company.ca()), ..OutboundConfig::default() };
    company.ask_within(&url, network, HostReach::Named).unwrap();
}

/// A3: A proxy resolves names itself. A host that is refused by its text is not requested from a proxy either.
#[test]
fn a_proxy_is_not_used_to_reach_this_machine() {
    let company = CompanyServer::new("git.example");
    let tunnel = ConnectProxy::to(company.server.address);
    let network = || OutboundConfig {
        ca_file: Some(company.ca()),
        proxy: Some(HttpProxy::parse_proxy(&tunnel.address.to_string(), "").unwrap()),
    };
    for host in ["localhost", "127.0.0.1", "10.0.0.1", "[::1]", "169.254.169.254"] {
        let url = format!("https://{host}/o/site.git");
        company.ask_within(&url, network(), HostReach::Public).unwrap_err();
    }
    assert_eq!(tunnel.asked(), [""; 0]);
    company.ask_within("https://git.example/o/site.git", network(), HostReach::Public).unwrap();
    assert!(tunnel.asked().len() >= 2);
}

/// A3: Git connects to the addresses that were checked, whatever its own resolver returns.
#[test]
fn git_connects_to_the_checked_addresses() {
    let company = CompanyServer::new("git.example");
    let home = company.place.path("home");
    let git = GitProgram::find(&home).unwrap();
    let plain = GitServer::start(&company.place.path("forge"), TOKEN);
    let port = plain.address.port();
    let ask = |host: &str, address: [u8; 4]| {
        let call =
            git.subcommand("ls-remote").with_pinned_addresses((host, port), &[address.into()]);
        let url = format!("http://{host}:{port}/o/site.git");
        call.arg("--").arg(url).output_text().unwrap_err().to_string()
    };
    // A server listens there and requires a credential.
    let heard = ask("git.example", [127, 0, 0, 1]);
    assert!(heard.contains("could not read Username"), "{heard}");
    // No server listens at this address, although one listens at the address of the name.
    let elsewhere = ask("localhost", [127, 0, 0, 2]);
    assert!(elsewhere.contains("Failed to connect"), "{elsewhere}");
}

/// L6: An invalid proxy setting is refused at the start, and its text is not repeated.
#[test]
fn an_invalid_proxy_is_refused() {
    for good in ["proxy.example:3128", "http://proxy.example", "http://u:p@[::1]:8/"] {
        HttpProxy::parse_proxy(good, "localhost,.example,10.0.0.0/8").unwrap();
    }
    for bad in ["", "https://proxy.example", "socks5://proxy.example", "http://", "a b"] {
        let error = HttpProxy::parse_proxy(bad, "").unwrap_err();
        assert_eq!(error.to_string(), "the proxy cannot be used; give `http://HOST:PORT`", "{bad}");
    }
    assert!(HttpProxy::parse_proxy("proxy.example", "a\nb").is_err());
}

/// A git server whose certificate only the company's own CA has signed.
struct CompanyServer {
    place: RelaySetup,
    authority: TestCa,
    server: GitServer,
}

impl CompanyServer {
    fn new(host: &str) -> Self {
        let authority = TestCa::new();
        let tls = authority.server(host, &["http/1.1"]);
        Self::behind(authority, tls)
    }

    fn behind(authority: TestCa, tls: rustls::ServerConfig) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let bare = directory.path().join("forge/o/site.git");
        let remote = repository::TestRepository::seeded(&bare);
        let server = GitServer::start_tls(&directory.path().join("forge"), TOKEN, tls);
        let url = bare.display().to_string();
        Self { place: RelaySetup::at(directory, remote, &url), authority, server }
    }

    fn ca(&self) -> std::path::PathBuf {
        self.authority.file.clone()
    }

    fn mirror(&self, url: &str, network: OutboundConfig, reach: HostReach) -> RepoMirror {
        let state = self.place.path("state");
        let git = GitProgram::find(Path::new(&state.join("home"))).unwrap().with_network(network);
        let repository: RepositoryUrl = url.parse().unwrap();
        RepoMirror::open(&git, &state, &repository.with_reach(reach)).unwrap()
    }

    fn ask(&self, url: &str, network: OutboundConfig) -> Result<(), RepoError> {
        self.ask_within(url, network, HostReach::Named)
    }

    fn ask_with(&self, url: &str, network: OutboundConfig, token: &str) -> Result<(), RepoError> {
        let mirror = self.mirror(url, network, HostReach::Named);
        let lease = mirror.lease_branch(&BranchKey::parse("ask").unwrap())?;
        mirror.ensure_branch(&lease, None, Some(&SecretString::new(token))).map(drop)
    }

    /// Returns the API's error.
    async fn ask_api(&self, url: &str, network: OutboundConfig, token: &str) -> String {
        let repository: RepositoryUrl = url.parse().unwrap();
        let config = GithubConfig {
            url: format!("https://localhost:{}", self.server.address.port()).parse().unwrap(),
            network,
            retry: RetryPolicy { attempts: 1, ..RetryPolicy::default() },
            ..GithubConfig::default()
        };
        let api = GithubClient::new(config).unwrap();
        let token = SecretString::new(token);
        let error = api.repository_info(&token, repository.as_hosted().unwrap()).await;
        error.unwrap_err().to_string()
    }

    fn ask_within(
        &self,
        url: &str,
        network: OutboundConfig,
        reach: HostReach,
    ) -> Result<(), RepoError> {
        let mirror = self.mirror(url, network, reach);
        let lease = mirror.lease_branch(&BranchKey::parse("ask").unwrap())?;
        mirror.ensure_branch(&lease, None, Some(&SecretString::new(TOKEN))).map(drop)
    }

    /// Delivers a run's work from that remote and back to it.
    fn relays(&self, url: &str, network: OutboundConfig) {
        let mirror = self.mirror(url, network, HostReach::Named);
        let token = SecretString::new(TOKEN);
        let setup = RelaySetup {
            mirror,
            directory: tempfile::tempdir().unwrap(),
            remote: self.place.remote.clone(),
            config: self.place.config.clone(),
        };
        let lease = setup.mirror.lease_branch(&BranchKey::parse("work").unwrap()).unwrap();
        let state = setup.mirror.ensure_branch(&lease, None, Some(&token)).unwrap();
        let run = setup.begin_with(lease, state, "one");
        run.workspace.write("more.txt", "more\n");
        run.workspace.commit("More");
        let announced = setup.extract(&run).unwrap().unwrap();
        let pushed = setup
            .judge(&run, announced)
            .unwrap()
            .into_approved()
            .unwrap()
            .push_branch(Some(&token));
        assert_eq!(setup.tip("sandbox/work"), pushed.unwrap().tip.to_string());
    }
}

const PASSWORD: &str = "hunter2hunter2";
