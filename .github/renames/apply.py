#!/usr/bin/env python3
"""apply.py ROOT LIST... [--dry]: makes a list of renames with rust-analyzer, all against one snapshot."""
import json,os,re,subprocess,sys,threading,time,queue
root=os.path.abspath(sys.argv[1]); dry='--dry' in sys.argv
lists=[a for a in sys.argv[2:] if not a.startswith('--')]
class LSP:
    def __init__(s):
        s.p=subprocess.Popen(['rust-analyzer'],stdin=subprocess.PIPE,stdout=subprocess.PIPE,stderr=open('rust-analyzer.log','w'),cwd=root)
        s.n=0; s.wait={}; s.quiet=threading.Event(); s.lock=threading.Lock(); s.nl=threading.Lock()
        threading.Thread(target=s.read,daemon=True).start()
    def send(s,m):
        b=json.dumps(m).encode()
        with s.lock:
            s.p.stdin.write(b'Content-Length: %d\r\n\r\n'%len(b)+b); s.p.stdin.flush()
    def req(s,method,params,timeout=600):
        with s.nl: s.n+=1; n=s.n
        q=queue.Queue(); s.wait[n]=q
        s.send({'jsonrpc':'2.0','id':n,'method':method,'params':params})
        return q.get(timeout=timeout)
    def note(s,method,params): s.send({'jsonrpc':'2.0','method':method,'params':params})
    def read(s):
        f=s.p.stdout
        while True:
            n=None
            while True:
                h=f.readline()
                if not h: return
                if h==b'\r\n': break
                if h.lower().startswith(b'content-length'): n=int(h.split(b':')[1])
            m=json.loads(f.read(n))
            if 'id' in m and 'method' in m:
                r=[SET for _ in m['params'].get('items',[])] if m['method']=='workspace/configuration' else None
                s.send({'jsonrpc':'2.0','id':m['id'],'result':r})
            elif 'id' in m:
                s.wait.pop(m['id']).put(m)
            elif m['method']=='experimental/serverStatus':
                print('status',m['params'],flush=True)
                if m['params'].get('quiescent'): s.quiet.set()
            elif m['method']=='$/progress':
                v=m['params']['value']
                if v.get('kind') in('begin','end'): print(' ',m['params']['token'],v.get('kind'),v.get('title',''),flush=True)
SET={'cargo':{'allTargets':True,'targetDir':os.environ.get('RA_TARGET','target/rust-analyzer'),'buildScripts':{'enable':True}},'procMacro':{'enable':True},'checkOnSave':False,
     'cachePriming':{'enable':True,'numThreads':2},'files':{'watcher':'client'},'linkedProjects':[root+'/Cargo.toml',root+'/fuzz/Cargo.toml']}
l=LSP(); t0=time.time()
uri=lambda p:'file://'+p
r=l.req('initialize',{'processId':os.getpid(),'rootUri':uri(root),'workspaceFolders':[{'uri':uri(root),'name':'x'}],'initializationOptions':SET,
 'capabilities':{'workspace':{'workspaceEdit':{'documentChanges':True,'resourceOperations':['rename','create']},'configuration':True},'window':{'workDoneProgress':True},'experimental':{'serverStatusNotification':True},'textDocument':{'rename':{'prepareSupport':True}}}})
l.note('initialized',{})
l.quiet.wait(1800); print('ready',round(time.time()-t0),flush=True)
texts={}
def lines(f):
    if f not in texts: texts[f]=open(os.path.join(root,f)).read().split('\n')
    return texts[f]
KW={'type':r'(?:struct|enum|union|trait|type)','fn':r'fn','const':r'(?:const|static)(?:\s+mut)?'}
def u16(s): return len(s.encode('utf-16-le'))//2
def find(kind,f,old,owner):
    c=[]; own=''
    for i,s in enumerate(lines(f)):
        m=re.match(r'^impl\b(.*?)\{',s) or re.match(r'^impl\b(.*)$',s)
        if m: own=s
        else:
            m=re.match(r'^(?:pub(?:\([^)]*\))?\s+)?(?:unsafe )?trait\s+(\w+)',s)
            if m: own=s
        if s.startswith('}'): own=''
        m=re.match(r'^\s*(?:pub(?:\([^)]*\))?\s+)?(?:default\s+)?(?:const\s+|async\s+|unsafe\s+|extern\s+"C"\s+)*'+KW[kind]+r'\s+('+re.escape(old)+r')\b',s)
        if m: c.append((i,m.start(1),own,s))
    if len(c)>1 and owner: 
        d=[x for x in c if re.search(r'\b'+re.escape(owner)+r'\b',x[2]) or owner in x[3]]
        if d: c=d
        if len(d)>1:
            e=[x for x in d if ' for ' not in x[2]]
            if len(e)==1: c=e
    return c
edits={}  # file -> {(line,char,endline,endchar): text}
moves=[]; problems=[]; renamed={}
def add(ch,why):
    for c in ch.get('documentChanges') or []:
        if c.get('kind')=='rename': moves.append((c['oldUri'][7:],c['newUri'][7:])); continue
        f=c['textDocument']['uri'][7:]
        if not f.startswith(root): problems.append(('outside',f,why)); continue
        for e in c['edits']:
            r=e['range']; k=(r['start']['line'],r['start']['character'],r['end']['line'],r['end']['character'])
            o=edits.setdefault(f,{})
            if k in o and o[k]!=e['newText']: problems.append(('clash',f,k,o[k],e['newText'],why))
            o[k]=e['newText']
rows=[]
for path in lists:
    for n,s in enumerate(open(path),1):
        s=s.rstrip('\n')
        if not s or s.startswith('#'): continue
        p=s.split('\t')
        if len(p)<4 or p[0] not in('type','fn','const','mod'): problems.append(('line',path,n,s)); continue
        rows.append([x.strip() for x in p]+['']*(6-len(p)))
only=set(os.environ.get('KINDS','type,fn,const,mod').split(','))
done=0
jobs=[]
for kind,f,old,new,owner,flag in [r[:6] for r in rows]:
    if kind not in only or old==new: continue
    if not os.path.exists(os.path.join(root,f)): problems.append(('nofile',f,old)); continue
    if kind=='mod':
        stem=os.path.basename(f)[:-3]; d=os.path.dirname(f); parents=[d+'.rs',d+'/mod.rs',d+'/lib.rs',d+'/main.rs']
        pos=None
        for pf in parents:
            if os.path.exists(os.path.join(root,pf)):
                for i,t in enumerate(lines(pf)):
                    m=re.match(r'^\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+('+stem+r')\s*;',t)
                    if m: pos=(pf,i,m.start(1))
        if not pos: problems.append(('nomod',f,old)); continue
        f,i,col=pos; new=os.path.basename(new).removesuffix('.rs')
    else:
        c=find(kind,f,old,owner)
        if len(c)!=1: problems.append(('found %d'%len(c),kind,f,old,owner)); continue
        i,col=c[0][0],c[0][1]
    jobs.append((f,i,col,old,new))
from concurrent.futures import ThreadPoolExecutor
def ask(j):
    f,i,col,old,new=j
    try: return j,l.req('textDocument/rename',{'textDocument':{'uri':uri(os.path.join(root,f))},'position':{'line':i,'character':u16(lines(f)[i][:col])},'newName':new})
    except queue.Empty: return j,{'error':{'message':'timeout'}}
with ThreadPoolExecutor(4) as ex:
    for (f,i,col,old,new),r in ex.map(ask,jobs):
        if 'error' in r or not r.get('result'): problems.append(('refused',f,old,new,r.get('error',{}).get('message','none'))); continue
        add(r['result'],(f,old,new)); renamed[(os.path.join(root,f),i)]=(old,new); done+=1
        if done%100==0: print(done,round(time.time()-t0),flush=True)
# intra-doc links
links=0
if '--nodocs' not in sys.argv:
  olds={o for o,_ in renamed.values()}
  asks=[]
  for d,_,fs in os.walk(os.path.join(root,'src')):
    for fn in fs:
        if not fn.endswith('.rs'): continue
        f=os.path.relpath(os.path.join(d,fn),root)
        for i,t in enumerate(lines(f)):
            if not re.match(r'\s*//[/!]',t): continue
            for m in re.finditer(r'\[`([\w:]+)(?:\(\))?`\](?!\()|\[`[^`]*`\]\(([\w:]+)\)',t):
                g=1 if m.group(1) else 2
                at=m.start(g)
                for seg in m.group(g).split('::'):
                    if seg in olds: asks.append((f,i,at,seg,u16(t[:at])))
                    at+=len(seg)+2
  def where(a):
    f,i,at,seg,col=a
    return a,l.req('textDocument/definition',{'textDocument':{'uri':uri(os.path.join(root,f))},'position':{'line':i,'character':col+1}})
  with ThreadPoolExecutor(4) as ex:
    for (f,i,at,seg,col),r in ex.map(where,asks):
        res=r.get('result') or []
        if isinstance(res,dict): res=[res]
        for x in res:
            t=x.get('targetUri') or x.get('uri'); rg=x.get('targetSelectionRange') or x.get('range')
            k=(t[7:],rg['start']['line'])
            if k in renamed and renamed[k][0]==seg:
                edits.setdefault(os.path.join(root,f),{})[(i,col,i,col+len(seg))]=renamed[k][1]; links+=1
        if not res: problems.append(('nolink',f,i+1,seg))
print('renamed',done,'doc links',links,'files',len(edits),'moves',len(moves),round(time.time()-t0))
for p in problems: print('PROBLEM',p)
if not dry:
    for f,o in edits.items():
        t=open(f,newline='').read().split('\n')
        for (a,b,c,d),new in sorted(o.items(),reverse=True):
            def at(s,u):
                n=0
                for i,ch in enumerate(s):
                    if n>=u: return i
                    n+=2 if ord(ch)>0xffff else 1
                return len(s)
            if a==c: s=t[a]; t[a]=s[:at(s,b)]+new+s[at(s,d):]
            else: t[a:c+1]=[t[a][:at(t[a],b)]+new+t[c][at(t[c],d):]]
        open(f,'w',newline='').write('\n'.join(t))
    for a,b in moves:
        if os.path.exists(a): subprocess.check_call(['git','-C',root,'mv',a,b]) 
l.p.kill()
