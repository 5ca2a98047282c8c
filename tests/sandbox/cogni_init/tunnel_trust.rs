//! T6: Tests of the certificate and the variables that the agent's programs need for tunnels.

use std::io::{Read, Write};
use std::process::Command;
use std::thread;

use super::{InitEnd, InitFixture};

/// Serves one answer to every request of the fixture's gateway.
fn serve_answer(sandbox: &mut InitFixture, answer: &'static str) {
    let gateway = sandbox.gateway.take().unwrap();
    thread::spawn(move || {
        while let Ok((mut stream, _)) = gateway.accept() {
            let mut request = vec![0; 1024];
            let length = stream.read(&mut request).unwrap_or_default();
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            if request.starts_with("GET /connect/ca.pem HTTP/1.1\r\n") {
                let _ = stream.write_all(answer.as_bytes());
            }
        }
    });
}

/// Starts an agent in a mount namespace with its own `/run`.
fn run(sandbox: &InitFixture, options: &[&str], script: &str) -> InitEnd {
    let own_run = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /run; exec \"$@\"", "sh"];
    InitEnd::of(clean(&mut sandbox.under(&own_run, options, &["sh", "-c", script])))
}

/// Leaves out the variables of this machine, because `cogni-init` keeps those that are set.
fn clean(command: &mut Command) -> &mut Command {
    let path = std::env::var_os("PATH").unwrap_or_default();
    command.env_clear().env("PATH", path)
}

const ANSWER: &str = "HTTP/1.1 200 OK\r\ncontent-length: 60\r\n\r\n-----BEGIN CERTIFICATE-----\nabcd\n-----END CERTIFICATE-----\n";

/// T6: the certificate is there before the agent starts, and variables that the operator has set stay.
#[test]
fn the_agent_finds_the_certificate_of_its_tunnels() {
    let mut sandbox = InitFixture::new();
    serve_answer(&mut sandbox, ANSWER);
    let script = "cat $SSL_CERT_FILE; echo $GIT_SSL_CAINFO $CURL_CA_BUNDLE $NODE_USE_ENV_PROXY $no_proxy; echo $HTTPS_PROXY";
    let ended = run(&sandbox, &["--tunnels", "--env", "CURL_CA_BUNDLE=/own"], script);
    assert_eq!((ended.code, &*ended.stderr), (Some(0), ""));
    let port = sandbox.address.port();
    let expected = format!(
        "-----BEGIN CERTIFICATE-----\nabcd\n-----END CERTIFICATE-----\n/run/tunnel-ca.pem /own 1 localhost,127.0.0.1,::1\nhttp://localhost:{port}\n"
    );
    assert_eq!(ended.stdout, expected);
    let without = run(&sandbox, &[], "echo \"$SSL_CERT_FILE\"; ls /run/tunnel-ca.pem 2>&1");
    assert!(without.stdout.starts_with('\n') && without.code != Some(0), "{}", without.stdout);
}

/// T6: a gateway without tunnels is reported, and the agent does not start.
#[test]
fn a_gateway_without_tunnels_is_reported() {
    let mut sandbox = InitFixture::new();
    serve_answer(&mut sandbox, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    let ended = run(&sandbox, &["--tunnels"], "echo started");
    assert_eq!((ended.code, &*ended.stdout), (Some(69), ""));
    insta::assert_snapshot!(ended.stderr, @"cogni-init: the gateway gives no certificate for `--tunnels`: its answer has the status `404`; give a connection of the run `tunnel = true`, or leave the option out");
}
