//! G15: Tests of the look-ups of connections' hosts: a resolver that is silent stalls nothing else, whatever an agent asks
//! for.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cogni_gateway::base::host_lookups::HostLookup;
use http::Method;
use serde_json::json;

use super::aws::{KEY, KeyFile};
use super::server::SecureServer;
use super::{code_of, start_with_lookup};
use crate::support::app::TestApp;

/// A resolver that is silent about the hosts `silent…` until the test lets it answer, or ends.
#[derive(Clone, Default)]
struct SilentResolver(Arc<ResolverState>);

#[derive(Default)]
struct ResolverState {
    lookups: AtomicUsize,
    is_open: Mutex<bool>,
    opened: Condvar,
}

impl SilentResolver {
    fn lookup(&self) -> HostLookup {
        let own = Arc::clone(&self.0);
        Arc::new(move |host, _| {
            own.lookups.fetch_add(1, Ordering::Relaxed);
            let open = own.is_open.lock().unwrap();
            let is_silent = |open: &mut bool| host.starts_with("silent") && !*open;
            drop(own.opened.wait_while(open, is_silent).unwrap());
            Ok(vec!["127.0.0.1".parse().unwrap()])
        })
    }

    async fn wait_asked(&self, count: usize) {
        while self.0.lookups.load(Ordering::Relaxed) < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    fn answer(&self) {
        *self.0.is_open.lock().unwrap() = true;
        self.0.opened.notify_all();
    }
}

impl Drop for SilentResolver {
    fn drop(&mut self) {
        // The runtime waits for its threads.
        self.answer();
    }
}

fn silent_table(number: usize, more: &str) -> String {
    format!(
        "[connections.c{number}]\nurl = 'https://silent-{number}.example.test:9'\nallow_private_addresses = true\nprice_usd = '0.5'\n{more}"
    )
}

/// Sends a request whose client leaves as soon as the request is admitted, as the one of this number.
async fn ask_and_leave(app: &TestApp, path: &str, number: usize) {
    let client = app.client();
    tokio::select! {
        answer = client.get(path) => panic!("{answer:?}"),
        _ = app.recorded("connect.admitted", number) => {}
    }
}

/// Requests whose clients leave begin one look-up of a host, which goes on. Another connection answers meanwhile.
#[tokio::test]
async fn a_silent_resolver_is_asked_once() {
    let (server, resolver) = (SecureServer::start().await, SilentResolver::default());
    let open = "allow = ['* /**']\n";
    let table = silent_table(0, open) + &server.table("api", open);
    let app = start_with_lookup(&table, resolver.lookup()).await;
    for number in 1..=30 {
        ask_and_leave(&app, "/connect/c0/a", number).await;
    }
    resolver.wait_asked(1).await;
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    assert_eq!(resolver.0.lookups.load(Ordering::Relaxed), 2);
    let settled = app.recorded("connect.settled", 31).await;
    let gone = settled.iter().filter(|record| record["outcome"] == "client_gone");
    assert_eq!(gone.count(), 30);
    resolver.answer();
    app.stop().await;
}

/// A run with silent hosts gets a typed refusal, which costs nothing, also if the body was read before.
#[tokio::test]
async fn lookups_of_a_run_are_bounded() {
    let (resolver, key) = (SilentResolver::default(), KeyFile::new(&KEY));
    let open = "allow = ['* /**']\n";
    let tables = (0..9).map(|number| match number {
        8 => silent_table(8, &key.lines("execute-api", "")),
        _ => silent_table(number, open),
    });
    let app = start_with_lookup(&tables.collect::<String>(), resolver.lookup()).await;
    for number in 0..8 {
        ask_and_leave(&app, &format!("/connect/c{number}/a"), number + 1).await;
        resolver.wait_asked(number + 1).await;
    }
    app.recorded("connect.settled", 8).await;
    let refused = app.client().ask(Method::POST, "/connect/c8/a", "body", &[]).await;
    assert_eq!(code_of(&refused), "429 overloaded");
    assert_eq!(refused.header("retry-after"), Some("1"));
    insta::assert_snapshot!(refused.json()["error"]["message"].as_str().unwrap(), @"this run or its gateway looks up too many hosts at this time; try again");
    let spent = app.run.ledger.connection_spending()["c8"];
    assert_eq!((spent.requests, spent.bytes_out, spent.cost.0), (0, 0, 0));
    let settled = app.recorded("connect.settled", 9).await.remove(8);
    assert_eq!(
        (&settled["outcome"], &settled["bytes_out"], &settled["charged"]["cost_usd"]),
        (&json!("not_sent"), &json!(0), &json!(null))
    );
    let records = app.recorded("connect.refused", 1).await;
    assert_eq!(
        (&records[0]["code"], &records[0]["connection"]),
        (&json!("overloaded"), &json!("c8"))
    );
    resolver.answer();
    // Nothing listens there, so a request that may be sent fails.
    while code_of(&app.client().get("/connect/c8/a").await) != "502 upstream_failed" {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    app.stop().await;
}
